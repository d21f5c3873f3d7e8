"""Reads a checkpoint together with those that are parts of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire.model_loader.checkpoint import WeightReader


class JoinedReader(WeightReader):
    """The weights of several checkpoints.

    Args:
        own: the model's; of two tensors of one name, its is read.
        parts: by what their tensors' names begin with in the whole.
    """

    def __init__(self, own: WeightReader, parts: Mapping[str, WeightReader]) -> None:
        self._readers = {"": own, **parts}
        self.path, self.infos = own.path, {}
        for prefix, reader in self._readers.items():
            self.infos = {prefix + name: info for name, info in reader.infos.items()} | self.infos

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor), one checkpoint after the other."""
        told = set[str]()
        for prefix, reader in self._readers.items():
            for name, tensor in reader.stream():
                if prefix + name not in told:
                    told.add(prefix + name)
                    yield prefix + name, tensor
