"""A decoder whose layers attend to what an encoder has read beside the prompt.

Writes the keys and values of what was read. Which pages these are the worker decides.
Legend: E rows of an item, D hidden.
"""

import dataclasses
from collections.abc import Collection

import torch

from quire.layers.assembly import Weight
from quire.layers.decoder_layer import modules_of
from quire.layers.encoder.encoder import PREFIX, Encoder
from quire.layers.interface import ModelContext
from quire.layers.mixers.attention_variants import CrossAttentionLayer
from quire.layers.tower import TowerDecoder
from quire.models.spec import DecoderSpec


class CrossDecoder(TowerDecoder):
    """A model made from a spec with an `encoder`."""

    def __init__(self, spec: DecoderSpec, context: ModelContext, encoder: Encoder) -> None:
        super().__init__(spec, context, {PREFIX: encoder})
        self.encoder = encoder

    def follow_names(self, names: Collection[str]) -> None:
        if self.spec.tied_embeddings and "lm_head" in self.spec.weights.modules and "lm_head.weight" in names:
            # Newer configs of T5 say that the head is the embedding, whether or not the checkpoint has another one.
            self.spec = dataclasses.replace(self.spec, tied_embeddings=False)
            self.modules = modules_of(self.spec)
            self._num_own = len(self.modules)
        super().follow_names(names)

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module == "embedding" and self.encoder.spec.trunk.borrows_embedding:
            self.encoder.set_weight(module, weight)
        super()._set_weight(module, weight)

    def keep(self, rows_ED: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write the keys and values of what was read, in every layer, to these slots of their pages."""
        with torch.no_grad():
            for mixer in self._mixers():
                if isinstance(mixer, CrossAttentionLayer):
                    mixer.keep(rows_ED, slots_E)
