"""How fast this machine reads memory: the ceiling of decoding at small batches, where every weight is read once a token.

Measured in the same minutes as what it is compared with: on shared machines it drifts.
"""

import threading
import time

import numpy as np

BUFFER_BYTES = 512 * 1024 * 1024
"""Far beyond any cache."""


class ReadBandwidth:
    """Reads one large buffer with several threads.

    Args:
        num_threads: as many as the engine computes with.
    """

    def __init__(self, num_threads: int, num_bytes: int = BUFFER_BYTES) -> None:
        self._parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), max(1, num_threads))

    def measure(self, rounds: int = 5) -> float:
        """Bytes a second, the best of several rounds. An OR over 64-bit words: one load and one cheap operation each."""
        return max(self._one_round() for _ in range(rounds))

    def _one_round(self) -> float:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in self._parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - began)
