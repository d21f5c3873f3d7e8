"""Whether an output goes round in circles: its last tokens are one pattern, several times in a row.

Knows tokens. A token costs one comparison for each size of pattern that is looked for, however long the output is.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.sampling_params import RepetitionDetectionParams


class RepetitionWatch:
    """One output's tokens as they come.

    Args:
        params: what ends it; its patterns have at least one token.
        token_ids: the output so far.
    """

    __slots__ = ("_latest", "_needed", "_runs", "_smallest", "num_seen")

    def __init__(self, params: RepetitionDetectionParams, token_ids: Iterable[int] = ()) -> None:
        largest = params.max_pattern_size
        self._smallest = max(1, params.min_pattern_size)
        sizes = np.arange(self._smallest, largest + 1)
        self._needed: npt.NDArray[np.int64] = sizes * (params.min_count - 1)
        self._runs = np.zeros(len(sizes), dtype=np.int64)
        # The last tokens, the newest first; none of them is a token before there are so many.
        self._latest: npt.NDArray[np.int64] = np.full(largest, -1, dtype=np.int64)
        self.num_seen = 0
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> bool:
        """Whether the output ends with this token, because it repeats itself."""
        runs, latest = self._runs, self._latest
        # A run is how many tokens in a row were those of so many positions before.
        runs += 1
        runs *= latest[self._smallest - 1 :] == token_id
        latest[1:] = latest[:-1]
        latest[0] = token_id
        self.num_seen += 1
        return bool((runs >= self._needed).any())
