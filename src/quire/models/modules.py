"""From a spec to the modules of the model: its matrices, norms, embeddings and vectors, and how ranks share them.

Knows names, shapes and slices. A *module* is a matrix with its bias, a norm, an embedding, a bare vector, or all experts'
matrices of a layer under one another. What of a checkpoint fills them is the business of `weights.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from quire.layers.parallel import ParallelPlan
from quire.models.spec import Attention, DecoderSpec, FeedForward, GatedMLP, LayerNorm, MoE, Norm

Kind = Literal["linear", "embedding", "norm", "vector", "experts"]
Shard = Literal["none", "rows", "columns", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a module's rows that is sharded by itself, in `groups` that stay whole (q, k and v by heads)."""

    rows: int
    groups: int


@dataclasses.dataclass(frozen=True)
class Module:
    """One matrix, norm, embedding or vector of the model, before sharding.

    Attributes:
        name: ours, e.g. `layers.3.qkv`.
        sources: the checkpoint's module names, without prefix; one a part, or one for all parts.
        columns: of a matrix; 0 for norms and vectors.
        column_groups: groups that stay whole when columns are sharded.
        skip_rows: leading rows of the checkpoint's tensor that are not loaded.
        weight_offset: added to a norm's weight.
        plain: a matrix that stays in the model's own number type in every format (routers).
        experts: how many experts' matrices stand under one another.
        stacked: the name of the one tensor [experts, rows, columns] that may stand in the sources' place.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...]
    parts: tuple[Part, ...]
    columns: int = 0
    column_groups: int = 1
    bias: bool = False
    shard: Shard = "none"
    transposed: bool = False
    skip_rows: int = 0
    weight_offset: float = 0.0
    plain: bool = False
    experts: int = 1
    stacked: str = ""

    @property
    def is_quantizable(self) -> bool:
        """Whether a checkpoint may hold it in another number format: layers' matrices, never the head."""
        return self.kind == "linear" and self.name.startswith("layers.") and not self.plain

    @property
    def rows(self) -> int:
        """All rows, before sharding."""
        return sum(part.rows for part in self.parts)

    def local_rows(self, plan: ParallelPlan) -> list[slice]:
        """This rank's rows of each part, relative to the part."""
        if self.shard == "rows":
            return [plan.rows(part.rows, part.groups, self.name) for part in self.parts]
        if self.shard == "vocabulary":
            return [plan.vocabulary(part.rows) for part in self.parts]
        return [slice(0, part.rows) for part in self.parts]

    def local_columns(self, plan: ParallelPlan) -> slice:
        """This rank's columns."""
        if self.shard == "columns":
            return plan.columns(self.columns, self.column_groups, self.name)
        return slice(0, self.columns)

    def local_shape(self, plan: ParallelPlan) -> tuple[int, int]:
        """(rows, columns) that this rank keeps."""
        columns = self.local_columns(plan)
        return sum(rows.stop - rows.start for rows in self.local_rows(plan)), columns.stop - columns.start

    def has_bias_on(self, plan: ParallelPlan) -> bool:
        """Outputs of a matrix split by columns are summed over ranks, so one rank alone adds the bias."""
        return self.bias and (self.shard != "columns" or plan.rank == 0)


def modules_of(spec: DecoderSpec) -> list[Module]:
    """Every module of the model, embedding first, in the order of computation."""
    modules = [_embedding(spec, "embedding", spec.vocab, "none")]
    if spec.learned_positions is not None:
        positions = spec.learned_positions
        modules.append(_embedding(spec, "positions", positions.count, "none", positions.offset))
    for layer, (mixer, mlp) in enumerate(zip(spec.mixers(), spec.mlps(), strict=True)):
        modules.extend(_layer_modules(spec, layer, mixer, mlp))
    if spec.final_norm:
        modules.append(_norm(spec, "final_norm", spec.norm, spec.hidden))
    if not spec.tied_embeddings:
        modules.append(
            Module(
                "lm_head", "linear", _sources(spec, "lm_head"), (Part(spec.vocab, spec.vocab),), spec.hidden,
                bias=spec.lm_head_bias, shard="vocabulary",
            )
        )  # fmt: skip
    return modules


def _sources(spec: DecoderSpec, name: str, layer: int | None = None) -> tuple[str, ...]:
    given = spec.weights.modules.get(name)
    if given is None:
        raise ValueError(f"the weight table has no {name!r}, which the spec needs")
    within = "" if layer is None else spec.weights.layer.format(layer=layer)
    return tuple(within + source for source in ((given,) if isinstance(given, str) else given))


def _embedding(spec: DecoderSpec, name: str, rows: int, shard: Shard, skip_rows: int = 0) -> Module:
    return Module(
        name, "embedding", _sources(spec, name), (Part(rows, rows),), spec.hidden, shard=shard, skip_rows=skip_rows
    )


def _norm(spec: DecoderSpec, name: str, norm: Norm, size: int, layer: int | None = None) -> Module:
    full_name = name if layer is None else f"layers.{layer}.{name}"
    has_bias = isinstance(norm, LayerNorm) and norm.bias
    offset = 0.0 if isinstance(norm, LayerNorm) else norm.weight_offset
    parts = (Part(size, 1),)
    return Module(full_name, "norm", _sources(spec, name, layer), parts, bias=has_bias, weight_offset=offset)


def _layer_modules(spec: DecoderSpec, layer: int, mixer: Attention, mlp: FeedForward) -> Iterator[Module]:
    def linear(name: str, parts: tuple[Part, ...], columns: int, bias: bool, shard: Shard, groups: int = 1) -> Module:
        return Module(
            f"layers.{layer}.{name}", "linear", _sources(spec, name, layer), parts, columns, groups, bias, shard,
            transposed=name in spec.weights.transposed,
        )  # fmt: skip

    for place in ("before_mixer", "after_mixer", "before_mlp", "after_mlp"):
        if getattr(spec.placement, place):
            yield _norm(spec, place, spec.norm, spec.hidden, layer)
    q, kv = Part(mixer.heads * mixer.head_dim, mixer.heads), Part(mixer.kv_heads * mixer.head_dim, mixer.kv_heads)
    yield linear("qkv", (q, kv, kv), spec.hidden, mixer.qkv_bias, "rows")
    if mixer.qk_norm is not None:
        yield _norm(spec, "q_norm", mixer.qk_norm, mixer.head_dim, layer)
        yield _norm(spec, "k_norm", mixer.qk_norm, mixer.head_dim, layer)
    if mixer.sinks:
        sinks = (Part(mixer.heads, mixer.heads),)
        yield Module(f"layers.{layer}.sinks", "vector", _sources(spec, "sinks", layer), sinks, shard="rows")
    hidden = (Part(spec.hidden, 1),)
    yield linear("out", hidden, q.rows, mixer.out_bias, "columns", mixer.heads)
    if isinstance(mlp, MoE):
        yield from _mixture_modules(spec, layer, mlp)
        return
    wide = Part(mlp.intermediate, mlp.intermediate)
    if isinstance(mlp, GatedMLP):
        yield linear("gate_up", (wide, wide), spec.hidden, mlp.bias, "rows")
    else:
        yield linear("up", (wide,), spec.hidden, mlp.bias, "rows")
    yield linear("down", hidden, mlp.intermediate, mlp.bias, "columns", mlp.intermediate)


def _mixture_modules(spec: DecoderSpec, layer: int, mlp: MoE) -> Iterator[Module]:
    count, wide, hidden = mlp.routing.num_experts, Part(mlp.intermediate, mlp.intermediate), Part(spec.hidden, 1)

    def module(name: str, kind: Kind, parts: tuple[Part, ...], columns: int = 0, **settings: Any) -> Module:
        return Module(f"layers.{layer}.{name}", kind, _sources(spec, name, layer), parts, columns, **settings)

    def experts(name: str, parts: tuple[Part, ...], columns: int, shard: Shard, groups: int = 1) -> Module:
        sources = tuple(source.format(expert=e) for e in range(count) for source in _sources(spec, name, layer))
        stacked = spec.weights.stacked.get(name)
        return Module(
            f"layers.{layer}.{name}", "experts", sources, parts * count, columns, groups, shard=shard, experts=count,
            stacked="" if stacked is None else spec.weights.layer.format(layer=layer) + stacked,
        )  # fmt: skip

    yield module("router", "linear", (Part(count, 1),), spec.hidden, plain=True)
    if mlp.bias_correction:
        yield module("router_bias", "vector", (Part(count, 1),))
    yield experts("experts_gate_up", (wide, wide), spec.hidden, "rows")
    yield experts("experts_down", (hidden,), mlp.intermediate, "columns", mlp.intermediate)
    if mlp.shared is not None:
        shared = Part(mlp.shared.intermediate, mlp.shared.intermediate)
        yield module("shared_gate_up", "linear", (shared, shared), spec.hidden, shard="rows")
        yield module("shared_down", "linear", (hidden,), shared.rows, column_groups=shared.rows, shard="columns")
        if mlp.shared_gate:
            yield module("shared_gate", "linear", (Part(1, 1),), spec.hidden, plain=True)
