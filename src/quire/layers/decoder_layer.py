"""One layer of a decoder: its parts, and which of them each weight belongs to.

What they compute in which order is `decoder.py`'s business.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.feed_forward import FeedForwardLayer
from quire.layers.hyper import HyperConnection
from quire.layers.layer_end import LayerEnd
from quire.layers.mixers import MixerLayer
from quire.models.spec import Joint, Placement


@dataclasses.dataclass
class DecoderLayer:
    """One layer: its halves, what follows them, where its norms stand, and by place how outputs join the residual, and norms."""

    mixers: list[MixerLayer]
    mlp: FeedForwardLayer | None
    placement: Placement
    joints: dict[str, Joint]
    end: LayerEnd | None = None
    hyper: dict[str, HyperConnection] = dataclasses.field(default_factory=dict)
    norms: dict[str, NormWeight] = dataclasses.field(default_factory=dict)

    @property
    def linears(self) -> dict[str, LinearWeight]:
        """The matrices of both halves, by name; experts apart."""
        halves = [*self.mixers, *([self.mlp] if self.mlp is not None else [])]
        return {name: weight for half in halves for name, weight in half.linears.items()}

    def set_weight(self, name: str, weight: Weight) -> None:
        """Hand a module's weight to the half that has it."""
        for mixer in self.mixers:
            if name in mixer.NAMES:
                mixer.set_weight(name, weight)
                return
        if self.mlp is not None and name in self.mlp.NAMES:
            self.mlp.set_weight(name, weight)
        elif self.end is not None and name in self.end.NAMES:
            self.end.set_weight(name, weight)
        elif "_hyper" in name:
            self.hyper[name.partition("_")[0]].set_weight(name, weight)
        else:
            self.norms[name] = cast(NormWeight, weight)
