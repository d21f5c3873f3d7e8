"""From a spec to the list of tensors that a checkpoint must hold, and where each goes: a rank's slices of the model's modules.

Knows names, shapes and slices. Reads nothing and computes nothing. A *source* is one tensor of the checkpoint that fills
(part of) one module (see `modules.py`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from quire.errors import ConfigError
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.layers.parallel import ParallelPlan
from quire.models.modules import Deal, Module
from quire.models.spec import DecoderSpec


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

    @property
    def is_stack(self) -> bool:
        """Whether it holds several experts' matrices or vectors, as its first dimension says."""
        return len(self.shape) > (1 if self.columns is None else 2)

    def index(self, block: Block) -> tuple[slice, ...]:
        """What to read of the checkpoint's tensor for a block, in the checkpoint's own layout: of a tensor of all experts a
        piece of one."""
        if not self.shape:
            return ()
        first, rows = (), block.rows
        if self.is_stack:
            each = self.shape[2 if self.columns is not None and self.module.transposed else 1]
            expert = rows.start // each
            first, rows = (
                (slice(expert, expert + 1),),
                slice(rows.start - expert * each, rows.stop - expert * each, rows.step),
            )
        if self.columns is None:
            return (*first, rows)
        return (*first, self.columns, rows) if self.module.transposed else (*first, rows, self.columns)


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


def _module_sources(module: Module, prefix: str, plan: ParallelPlan, method: LinearMethod) -> Iterator[Source]:
    is_stacked = module.is_row or (bool(module.stacked) and module.sources == (module.stacked,))
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
            experts = (module.experts,) if is_stacked else ()
            each = shape_rows // module.experts if is_stacked else shape_rows
            shape: tuple[int, ...] = (each, module.columns) if is_matrix else (each,)
            if suffix not in ("", "weight", "bias"):
                shape = method.scale_shape(suffix, shape_rows)
            yield Source(
                name=("" if module.name == "lm_head" else prefix) + source + (f".{suffix}" if suffix else ""),
                module=module,
                suffix=suffix or "weight",
                shape=(*experts, *(shape[::-1] if module.transposed and is_matrix else shape)),
                blocks=blocks,
                columns=columns,
            )


def _blocks(module: Module, plan: ParallelPlan) -> list[tuple[int, tuple[Block, ...]]]:
    """For each source: its rows in the checkpoint, and this rank's blocks of them."""
    if module.interleaved:
        return [_interleaved_blocks(module, plan)]
    local, skip = module.local_rows(plan), module.skip_rows
    at = list(itertools.accumulate((rows.stop - rows.start for rows in local), initial=0))
    every = range(len(module.parts))
    deals = module.deals or (
        [Deal((part,)) for part in every] if len(module.sources) == len(every) else [Deal((*every,))]
    )
    if len(module.sources) != len(deals):
        raise ValueError(f"{module.name} has {len(module.sources)} sources for {len(every)} parts")
    found: list[tuple[int, tuple[Block, ...]]] = []
    for deal in deals:
        blocks: list[Block] = []
        start = skip
        for group in range(deal.groups):
            for part in deal.parts:
                share, mine = module.parts[part].rows // deal.groups, local[part]
                first, last = max(mine.start, group * share), min(mine.stop, (group + 1) * share)
                if first < last:
                    shift = start - group * share
                    blocks.append(Block(slice(first + shift, last + shift), at[part] + first - mine.start))
                start += share
        found.append((start, tuple(blocks)))
    return found


def _interleaved_blocks(module: Module, plan: ParallelPlan) -> tuple[int, tuple[Block, ...]]:
    """As `_blocks`, of one source in which parts 0 and 1 take turns row by row, then 2 and 3, and so on."""
    blocks: list[Block] = []
    start = at = 0
    for number, (part, rows) in enumerate(zip(module.parts, module.local_rows(plan), strict=True)):
        if rows.start < rows.stop:
            blocks.append(Block(slice(start + 2 * rows.start + number % 2, start + 2 * rows.stop, 2), at))
        at += rows.stop - rows.start
        start += number % 2 * 2 * part.rows
    return start, tuple(blocks)
