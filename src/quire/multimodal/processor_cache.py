"""What a frontend has processed, kept by content for the next time: least recently used first out, bounded in bytes."""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from quire.media import MediaTensor


@dataclasses.dataclass(frozen=True)
class Processed:
    """One item, processed: the tokens around it and its own, its grid, and what the encoder reads; see `Expansion`. `modality` is
    whose encoder reads it. Behind it may be `others`, which are given with it: the frames of a video."""

    before: list[int]
    token_ids: list[int]
    after: list[int]
    num_embeds: int
    grid: list[int]
    tensors: dict[str, MediaTensor]
    modality: str
    interval: float = 1.0
    others: "tuple[Processed, ...]" = ()

    def beside_images(self) -> "Processed":
        """A sound in a prompt that has images, too, of an encoder that makes other embeddings of such sounds."""
        return dataclasses.replace(self, tensors=self.tensors | {"beside": MediaTensor.from_array(np.ones(1))})

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        own = sum(len(tensor.data) for tensor in self.tensors.values())
        return own + sum(other.num_bytes for other in self.others)


class ProcessorCache:
    """Processed items by key. May be used by several threads.

    Args:
        max_bytes: of all arrays together; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Processed] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = self.num_queries = self.num_hits = 0

    def get_or_make(self, key: str, make: Callable[[], Processed]) -> Processed:
        """What is kept, or what this function makes, which is kept from now on."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def get(self, key: str) -> Processed | None:
        """What was put there, if it is there still."""
        with self._lock:
            self.num_queries += 1
            found = self._kept.get(key)
            if found is not None:
                self.num_hits += 1
                self._kept.move_to_end(key)
            return found

    def put(self, key: str, value: Processed) -> None:
        """Keep it, and drop what was not used for the longest time if there is no room."""
        size = value.num_bytes
        with self._lock:
            if size > self._max_bytes or key in self._kept:
                return
            self._kept[key] = value
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0
