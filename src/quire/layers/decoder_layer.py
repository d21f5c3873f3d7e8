"""The modules of a whole model, and one layer of it: its parts, and which of them each weight belongs to.

What they compute in which order is `decoder.py`'s business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.feed_forward import FeedForwardLayer
from quire.layers.hyper import HyperConnection
from quire.layers.layer_end import LayerEnd, LayerInputs
from quire.layers.mixers import MixerLayer, kind_of
from quire.layers.modules import LayerScope, Module, Part
from quire.models.residual import Joint, Placement
from quire.models.spec import DecoderSpec


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

    @staticmethod
    def modules(scope: LayerScope) -> Iterator[Module]:
        """Norms, then the mixers' modules, then the feed-forward's."""
        spec, layer = scope.spec, cast(int, scope.layer)
        for place in norm_places(spec, layer) if spec.norm.weight else ():
            yield scope.norm(place, spec.norm, spec.hidden)
        for mixer in spec.mixers_of(layer):
            yield from kind_of(mixer).modules(scope, mixer)
        mlp = spec.mlps()[layer]
        if mlp is not None:
            yield from FeedForwardLayer.modules(scope, mlp)
        yield from LayerEnd.modules(scope)
        for half in ("mixer_hyper", "mlp_hyper"):
            yield from HyperConnection.modules(scope, half)

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


def modules_of(spec: DecoderSpec) -> list[Module]:
    """Every module of the model, embedding first, in the order of computation."""
    model = LayerScope(spec)
    width = spec.embedding_width or spec.hidden
    modules = [model.embedding("embedding", spec.vocab, width)]
    if spec.embedding_width:
        modules.append(model.linear("project_in", (model.hidden,), width))
    if spec.learned_positions is not None:
        positions = spec.learned_positions
        modules.append(model.embedding("positions", positions.count, spec.hidden, positions.offset))
    if spec.token_types:
        modules.append(model.embedding("token_types", spec.token_types, spec.hidden))
    if spec.embedding_norm is not None and spec.embedding_norm.weight:
        modules.append(model.norm("embedding_norm", spec.embedding_norm, spec.hidden))
    modules.extend(LayerInputs.modules(model))
    for layer in range(spec.layers):
        modules.extend(DecoderLayer.modules(LayerScope(spec, layer)))
    modules.extend(HyperConnection.modules(model, "hyper_head"))
    if spec.final_norm and spec.norm.weight:
        modules.append(model.norm("final_norm", spec.norm, spec.hidden))
    if spec.embedding_width:
        modules.append(model.linear("project_out", (Part(width, 1),)))
    if not spec.tied_embeddings:
        head = (Part(spec.vocab, spec.vocab),)
        lm_head = model.linear("lm_head", head, width, bias=spec.lm_head_bias, shard="vocabulary")
        modules.append(dataclasses.replace(lm_head, normalized=spec.normalized_head))
    elif spec.lm_head_bias:
        modules.append(model.vector("lm_head_bias", Part(spec.vocab, 1)))
    return modules


def norm_places(spec: DecoderSpec, layer: int) -> list[str]:
    """Where a layer has norms; a half that it lacks has none."""
    halves = [name for name, half in (("mixer", spec.mixers_of(layer)), ("mlp", spec.mlps()[layer])) if half]
    places = ("before_mixer", "after_mixer", "before_mlp", "after_mlp")
    placement = spec.placements()[layer]
    there = [place for place in places if getattr(placement, place) and place.partition("_")[2] in halves]
    return there if layer or spec.first_norm else [place for place in there if place != "before_mixer"]
