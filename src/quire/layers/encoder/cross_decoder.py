"""A decoder whose layers attend to what an encoder has read beside the prompt.

Knows whose weights are whose, and writes the keys and values of what was read. Which pages these are the worker decides.
Legend: E rows of an item, D hidden.
"""

from collections.abc import Collection
from typing import Any

import torch

from quire.layers.assembly import Weight
from quire.layers.decoder import Decoder
from quire.layers.encoder.encoder import PREFIX, Encoder
from quire.layers.interface import ModelContext
from quire.layers.mixers.cross import CrossAttentionLayer
from quire.models.spec import DecoderSpec


class CrossDecoder(Decoder):
    """A model made from a spec with an `encoder`."""

    def __init__(self, spec: DecoderSpec, context: ModelContext, encoder: Encoder) -> None:
        super().__init__(spec, context)
        self.encoder = encoder
        self._add_encoder()

    def _add_encoder(self) -> None:
        self.modules = [*self.modules, *self.encoder.modules]
        self.sources |= self.encoder.sources()

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self.encoder.buffer_bytes

    def follow_names(self, names: Collection[str]) -> None:
        own = len(self.modules) - len(self.encoder.modules)
        self.modules = self.modules[:own]
        super().follow_names(names)
        self._add_encoder()

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module.startswith(PREFIX):
            self.encoder.set_weight(module.removeprefix(PREFIX), weight)
            return
        if module == "embedding" and self.encoder.spec.trunk.borrows_embedding:
            self.encoder.set_weight(module, weight)
        super()._set_weight(module, weight)

    def keep(self, rows_ED: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write the keys and values of what was read, in every layer, to these slots of their pages."""
        with torch.no_grad():
            for mixer in self._mixers():
                if isinstance(mixer, CrossAttentionLayer):
                    mixer.keep(rows_ED, slots_E)

    def describe(self) -> dict[str, Any]:
        report = super().describe()
        return report | {"workspace_bytes": report["workspace_bytes"] + self.encoder.buffer_bytes}
