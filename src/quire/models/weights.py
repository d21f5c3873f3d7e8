"""From a spec to the list of tensors that a checkpoint must hold, and where each goes: a rank's slices of the model's modules.

Knows names, shapes and slices. Reads nothing and computes nothing. A *module* is a matrix with its bias, a norm, an
embedding, a bare vector, or all experts' matrices of a layer under one another; a *source* is one tensor of the checkpoint
that fills (part of) one module.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from quire.errors import ConfigError
from quire.layers.linear import LinearMethod, UnquantizedLinear
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


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a checkpoint tensor that go to `at` and following rows of the local module."""

    rows: slice
    at: int


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint: its full shape there, and what of it this rank copies where."""

    name: str
    module: Module
    suffix: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    columns: slice | None

    @property
    def is_scale(self) -> bool:
        """Whether it stands beside a matrix, as one number or one a row."""
        return self.suffix not in ("weight", "bias")

    def index(self, block: Block) -> tuple[slice, ...]:
        """What to read of the checkpoint's tensor for a block, in the checkpoint's own layout: of a tensor of all experts a
        piece [1, rows, columns]."""
        if not self.shape:
            return ()
        if self.columns is None:
            return (block.rows,)
        if len(self.shape) == 3:
            expert, start = divmod(block.rows.start, self.shape[1])
            return (slice(expert, expert + 1), slice(start, start + block.rows.stop - block.rows.start), self.columns)
        return (self.columns, block.rows) if self.module.transposed else (block.rows, self.columns)


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


def sources_of(
    modules: list[Module], spec: DecoderSpec, plan: ParallelPlan, method: LinearMethod | None = None
) -> dict[str, Source]:
    """The checkpoint tensors that fill the modules, by name (with the first of the spec's prefixes)."""
    prefix, method = spec.weights.prefixes[0], method or UnquantizedLinear()
    return {source.name: source for module in modules for source in _module_sources(module, prefix, plan, method)}


def with_layout_of(modules: list[Module], spec: DecoderSpec, names: Collection[str]) -> list[Module]:
    """The modules, filled from one tensor of all experts where a checkpoint with these names has one."""
    stacked = {module.stacked for module in modules if module.stacked}
    there = {name for name in stacked for prefix in spec.weights.prefixes if prefix + name in names}
    return [
        dataclasses.replace(module, sources=(module.stacked,)) if module.stacked in there else module
        for module in modules
    ]


def canonical_name(name: str, sources: Mapping[str, Source], spec: DecoderSpec) -> str:
    """The name in `sources` that a checkpoint's name means, whichever prefix it has; itself where it means none."""
    if name in sources:
        return name
    first, *_ = spec.weights.prefixes
    for prefix in spec.weights.prefixes:
        within = name.removeprefix(prefix)
        if first + within in sources and name.startswith(prefix):
            return first + within
        # Heads usually stand outside the prefix, but not always.
        for outside in (within, name.removeprefix(prefix.removesuffix("model."))):
            if outside in sources:
                return outside
    return name


def check_names(sources: Mapping[str, Source], spec: DecoderSpec, names: Collection[str]) -> None:
    """Raises ConfigError that lists every name that is missing and every one that has no place."""
    canonical = {canonical_name(name, sources, spec) for name in names}
    missing = sorted(set(sources) - canonical)
    unexpected = sorted(name for name in canonical - set(sources) if not is_ignored(name, spec))
    if missing or unexpected:
        raise ConfigError(
            "the checkpoint's weights are not this architecture's. "
            f"Missing ({len(missing)}): {_listing(missing)}. Unexpected ({len(unexpected)}): {_listing(unexpected)}",
            setting="model",
        )


def check_shapes(sources: Mapping[str, Source], spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError that lists every tensor whose shape is not what config.json asks for."""
    wrong: list[str] = []
    for name, shape in shapes.items():
        source = sources.get(canonical_name(name, sources, spec))
        if source is None or (source.is_scale and math.prod(shape) == math.prod(source.shape)):
            continue
        if tuple(shape) != source.shape:
            wrong.append(f"{name} is {list(shape)}, config.json asks for {list(source.shape)}")
    if wrong:
        raise ConfigError(f"wrong weight shapes ({len(wrong)}): {_listing(wrong, '; ')}", setting="model")


def _listing(items: list[str], separator: str = ", ", limit: int = 20) -> str:
    more = f"{separator}… and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more or "none"


CACHE_SCALES = ("*.k_scale", "*.v_scale", "*.kv_scale", "*.q_scale", "*.prob_scale")
"""Scales for a cache in float8: keys and values are written there as they are."""


def is_cache_scale(name: str) -> bool:
    """Whether a tensor of the checkpoint is a scale for keys or values."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CACHE_SCALES)


def is_ignored(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor of the checkpoint carries nothing to load."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in spec.weights.ignored) or is_cache_scale(name):
        return True
    return spec.tied_embeddings and name.endswith("lm_head.weight")


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


def _module_sources(module: Module, prefix: str, plan: ParallelPlan, method: LinearMethod) -> Iterator[Source]:
    is_stacked = bool(module.stacked) and module.sources == (module.stacked,)
    suffixes = [""] if module.kind == "vector" or is_stacked else ["weight"]
    if module.is_quantizable:
        method = method.of_module(module.sources)
        suffixes = list(method.suffixes)
    if module.bias:
        suffixes.append("bias")
    for suffix in suffixes:
        is_matrix = module.columns > 0 and suffix in ("", "weight")
        columns = module.local_columns(plan) if is_matrix else None
        for source, (shape_rows, blocks) in zip(module.sources, _blocks(module, plan), strict=True):
            shape: tuple[int, ...] = (shape_rows, module.columns) if is_matrix else (shape_rows,)
            if is_stacked:
                shape = (module.experts, shape_rows // module.experts, module.columns)
            if suffix not in ("", "weight", "bias"):
                shape = method.scale_shape(suffix, shape_rows)
            yield Source(
                name=("" if module.name == "lm_head" else prefix) + source + (f".{suffix}" if suffix else ""),
                module=module,
                suffix=suffix or "weight",
                shape=shape[::-1] if module.transposed and is_matrix else shape,
                blocks=blocks,
                columns=columns,
            )


def _blocks(module: Module, plan: ParallelPlan) -> list[tuple[int, tuple[Block, ...]]]:
    """For each source: its rows in the checkpoint, and this rank's blocks of them."""
    blocks: list[tuple[int, Block]] = []
    at = 0
    for part, rows in zip(module.parts, module.local_rows(plan), strict=True):
        blocks.append((part.rows, Block(rows, at)))
        at += rows.stop - rows.start
    if len(module.sources) == len(blocks):
        skip = module.skip_rows
        return [
            (rows + skip, (Block(slice(block.rows.start + skip, block.rows.stop + skip), block.at),))
            for rows, block in blocks
        ]
    if len(module.sources) != 1:
        raise ValueError(f"{module.name} has {len(module.sources)} sources for {len(blocks)} parts")
    fused: list[Block] = []
    start = 0
    for rows, block in blocks:
        fused.append(Block(slice(start + block.rows.start, start + block.rows.stop), block.at))
        start += rows
    return [(start, tuple(fused))]
