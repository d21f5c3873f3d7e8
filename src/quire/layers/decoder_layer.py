"""The modules of a whole model, and one layer of it: its parts, and which of them each weight belongs to.

What they compute in which order is `decoder.py`'s business.
"""

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch

from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.feed_forward import FeedForwardLayer
from quire.layers.interface import LayerContext
from quire.layers.mixers import MixerLayer, kind_of
from quire.layers.mixers.interface import SCALES
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.residual_extras import HyperConnection, LayerEnd, LayerInputs
from quire.models.sight import Patches
from quire.models.spec import DecoderSpec, LearnedPositions

JOIN_VECTOR = "_scale"
"""Behind a place's name: the vector of a learned joint."""
BOUNDS = "_bounds"
"""Behind a matrix's name: within what its inputs and outputs are kept."""
_Owner = MixerLayer | FeedForwardLayer | LayerEnd | HyperConnection


class DecoderLayer:
    """One layer on this rank.

    Attributes:
        mixers, mlp: its halves. end: what follows them. hyper: how halves read and write residual streams.
        placement, norm_places: where it has norms; `norms` has their weights.
        joints: by place, how a half's output joins the residual; `join_vectors` has the learned ones' vectors.
    """

    def __init__(self, spec: DecoderSpec, layer: int, context: LayerContext) -> None:
        mixers, mlp, builder = spec.mixers_of(layer), spec.mlps()[layer], ModuleBuilder(spec, layer)
        self.placement, self.joints = spec.placements()[layer], spec.joints_of(layer)
        self.norm_places = norm_places(spec, layer)
        self.norms: dict[str, NormWeight] = {}
        self.join_vectors: dict[str, torch.Tensor] = {}
        self.mixers = [kind_of(mixer)(mixer, context) for mixer in mixers]
        self.mlp = None if mlp is None else FeedForwardLayer(mlp, context, f"layers.{layer}")
        has_end = spec.layer_scale or spec.layer_input is not None
        self.end = LayerEnd(layer, spec.layer_input, context.linear_method) if has_end else None
        self.hyper = {} if spec.hyper is None else {half: HyperConnection(spec.hyper) for half in ("mixer", "mlp")}
        self._owners: dict[str, _Owner] = {}
        for made, mixer in zip(self.mixers, mixers, strict=True):
            self._own(made, made.modules(builder, mixer))
        if self.mlp is not None and mlp is not None:
            self._own(self.mlp, self.mlp.modules(builder, mlp))
        if self.end is not None:
            self._own(self.end, self.end.modules(builder))
        for half, hyper in self.hyper.items():
            self._own(hyper, hyper.modules(builder, f"{half}_hyper"))

    def _own(self, part: _Owner, modules: Iterator[Module]) -> None:
        """Note which part of the layer takes the weights of these modules."""
        for module in modules:
            self._owners[module.name.rpartition(".")[2]] = part

    @staticmethod
    def modules(builder: ModuleBuilder) -> Iterator[Module]:
        """Norms, then the mixers' modules, then the feed-forward's."""
        spec, layer = builder.spec, cast(int, builder.layer)
        for place in norm_places(spec, layer) if spec.norm.weight else ():
            yield builder.norm(place, spec.norm, spec.hidden)
        for mixer in spec.mixers_of(layer):
            yield from kind_of(mixer).modules(builder, mixer)
        mlp = spec.mlps()[layer]
        if mlp is not None:
            yield from FeedForwardLayer.modules(builder, mlp)
        for place, joint in spec.joints_of(layer).items():
            if joint.learned:
                yield builder.vector(place + JOIN_VECTOR, builder.hidden)
        yield from LayerEnd.modules(builder)
        for half in ("mixer_hyper", "mlp_hyper"):
            yield from HyperConnection.modules(builder, half)

    @property
    def linears(self) -> dict[str, LinearWeight]:
        """The matrices of both halves, by name; experts apart."""
        halves = [*self.mixers, *([self.mlp] if self.mlp is not None else [])]
        return {name: weight for half in halves for name, weight in half.linears.items()}

    def set_weight(self, name: str, weight: Weight) -> None:
        """Hand a module's weight to the part that has it."""
        if name in self.norm_places:
            self.norms[name] = cast(NormWeight, weight)
        elif (place := name.removesuffix(JOIN_VECTOR)) in self.joints:
            self.join_vectors[place] = cast(torch.Tensor, weight)
        elif name in SCALES:
            for mixer in self.mixers:
                mixer.set_cache_scale(name, cast(torch.Tensor, weight))
        else:
            self._owners[name].set_weight(name, weight)


def modules_of(spec: DecoderSpec) -> list[Module]:
    """Every module of the model, embedding first, in the order of computation."""
    model = ModuleBuilder(spec)
    width = spec.embedding_width or spec.hidden
    modules = list(_patch_modules(model, spec.patches)) if spec.patches else []
    if spec.patches is None and spec.frames is None and not (spec.borrows_embedding or spec.reads_items):
        modules.append(_embedding(model, width))
    if spec.embedding_width:
        modules.append(model.linear("project_in", (model.hidden,), width))
    if isinstance(spec.learned_positions, LearnedPositions):
        positions = spec.learned_positions
        modules.append(model.embedding("positions", positions.count, spec.hidden, positions.offset))
    if spec.token_types:
        modules.append(model.embedding("token_types", spec.token_types, spec.hidden))
    if spec.embedding_norm is not None and spec.embedding_norm.weight:
        modules.append(model.norm("embedding_norm", spec.embedding_norm, spec.hidden))
    modules.extend(LayerInputs.modules(model))
    for layer in range(spec.layers):
        modules.extend(DecoderLayer.modules(ModuleBuilder(spec, layer)))
    if spec.bounded:
        modules.extend([bounds_of(module) for module in modules if module.is_quantizable])
    modules.extend(HyperConnection.modules(model, "hyper_head"))
    if spec.final_norm and spec.norm.weight:
        modules.append(model.norm("final_norm", spec.norm, spec.hidden))
    if spec.embedding_width:
        modules.append(model.linear("project_out", (RowBlock(width, 1),)))
    if not spec.tied_embeddings:
        head = (RowBlock(spec.vocab, spec.vocab),)
        lm_head = model.linear("lm_head", head, width, bias=spec.lm_head_bias, shard="vocabulary")
        is_padded = "lm_head" in spec.weights.padded
        modules.append(dataclasses.replace(lm_head, normalized=spec.normalized_head, is_padded=is_padded))
    elif spec.lm_head_bias:
        modules.append(model.vector("lm_head_bias", RowBlock(spec.vocab, 1)))
    of_tokens = ("embedding", "lm_head", "lm_head_bias")
    return [
        dataclasses.replace(module, added_rows=spec.added_tokens) if module.name in of_tokens else module
        for module in modules
    ]


def bounds_of(module: Module) -> Module:
    """For each of a matrix's parts the least and the most of its inputs, and of its outputs."""
    ends = ("input_min", "input_max", "output_min", "output_max")
    sources = tuple(f"{source.removesuffix('.linear')}.{end}" for source in module.sources for end in ends)
    one = (RowBlock(1, 1),) * len(sources)
    return Module(module.name + BOUNDS, "table", sources, one, is_flattened=True)


def _embedding(model: ModuleBuilder, width: int) -> Module:
    return model.embedding("embedding", model.spec.vocab, width)


def _patch_modules(model: ModuleBuilder, patches: Patches) -> Iterator[Module]:
    """What makes rows of patches: a convolution in the checkpoint, whose steps are as long as its squares."""
    if patches.norm is not None:
        yield model.norm("patch_norm", patches.norm, patches.values)
    linear = model.linear("patch", (model.hidden,), patches.values, bias=patches.bias)
    frames = (patches.frames,) if patches.is_cut else ()
    yield dataclasses.replace(linear, dims=(patches.channels, *frames, patches.size, patches.size))
    if patches.class_token:
        yield model.vector("class_token", model.hidden)


def norm_places(spec: DecoderSpec, layer: int) -> list[str]:
    """Where a layer has norms; a half that it lacks has none."""
    halves = [name for name, half in (("mixer", spec.mixers_of(layer)), ("mlp", spec.mlps()[layer])) if half]
    places = ("before_mixer", "after_mixer", "before_mlp", "after_mlp")
    placement = spec.placements()[layer]
    there = [place for place in places if getattr(placement, place) and place.partition("_")[2] in halves]
    return there if layer or spec.first_norm else [place for place in there if place != "before_mixer"]
