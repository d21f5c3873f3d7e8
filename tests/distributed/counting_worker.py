"""A worker that tells which items its rank has encoded: named by class path, made in the child."""

from collections.abc import Sequence

import torch

from quire.media import MediaItem
from quire.worker.item_encoder import ItemEncoder
from quire.worker.worker import Worker

_encode, _keys = ItemEncoder._encode, list[str]()


def _counted(self: ItemEncoder, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    _keys.extend(item.key for item in items)
    return _encode(self, items)


class CountingWorker(Worker):
    """Counts in its process."""

    def load_model(self) -> None:
        ItemEncoder._encode = _counted
        super().load_model()

    def encoded(self) -> list[str]:
        """Keys of items, since the last call."""
        found, _keys[:] = list(_keys), []
        return found
