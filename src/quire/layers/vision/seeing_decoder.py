"""A decoder with eyes: its own layers, and the tower whose embeddings take the place of some tokens'.

Knows whose weights are whose. What an image is, is the tower's business, and which tokens are images the worker's.
"""

from collections.abc import Collection
from typing import Any

from quire.layers.assembly import Weight
from quire.layers.decoder import Decoder
from quire.layers.interface import ModelContext
from quire.layers.vision.tower import PREFIX, VisionTower
from quire.models.spec import DecoderSpec


class SeeingDecoder(Decoder):
    """A model made from a spec with `vision`."""

    def __init__(self, spec: DecoderSpec, context: ModelContext, tower: VisionTower) -> None:
        super().__init__(spec, context)
        self.tower = tower
        self._add_tower()

    def _add_tower(self) -> None:
        self.modules = [*self.modules, *self.tower.modules]
        self.sources |= self.tower.sources()

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self.tower.buffer_bytes

    @property
    def media_width(self) -> int:
        """Columns of an embedding, with what joins behind the first layers."""
        return self.spec.hidden * (1 + len(self.tower.spec.taps))

    def follow_names(self, names: Collection[str]) -> None:
        own = len(self.modules) - len(self.tower.modules)
        self.modules = self.modules[:own]
        super().follow_names(names)
        self._add_tower()

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module.startswith(PREFIX):
            self.tower.set_weight(module.removeprefix(PREFIX), weight)
        else:
            super()._set_weight(module, weight)

    def describe(self) -> dict[str, Any]:
        report = super().describe()
        return report | {"workspace_bytes": report["workspace_bytes"] + self.tower.buffer_bytes}
