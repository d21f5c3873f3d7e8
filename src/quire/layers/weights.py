"""From a spec to the list of tensors that a checkpoint must hold, and where each goes: a rank's slices of the model's modules.

Knows names, shapes and slices. Reads nothing and computes nothing. A *source* is one tensor of the checkpoint that fills
(part of) one module (see `modules.py`).
"""

import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping

import torch

from quire.errors import ConfigError
from quire.layers.linear import COLUMNS, PLAIN, ROWS, Axis, LinearMethod, Stored, UnquantizedLinear
from quire.layers.modules import Module, SourceLayout
from quire.layers.parallel import ParallelPlan
from quire.models.spec import MLA, Attention, DecoderSpec
from quire.models.variants import SparseMLA

VECTOR, TRANSPOSED = Stored((ROWS,)), Stored((COLUMNS, ROWS))
CONVOLUTION = Stored((ROWS, Axis("none"), COLUMNS))
WHOLE_NUMBERS = Stored((ROWS, COLUMNS), dtypes=(torch.int64, torch.int32))


@dataclasses.dataclass(frozen=True)
class RowSlice:
    """Rows of a checkpoint tensor that go to `at` and following rows of the local module."""

    rows: slice
    at: int


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of the checkpoint: how it is stored there, and what of it this rank copies where.

    Attributes:
        name: the tensor's.
        source: the matrix's or vector's that it belongs to, without the model's prefix.
        rows: of that matrix or vector in the checkpoint.
        stored: its dimensions in terms of these rows, and the module's columns.
        blocks: this rank's rows.
        columns: this rank's columns; None for vectors.
        is_decoded: it is one of the tensors of a matrix in a format of its own, rather than values of the module.
        is_stack: it holds several experts' matrices or vectors, as its first dimension says.
        is_whole: all of its matrix is read, and cut when it has been decoded.
    """

    name: str
    module: Module
    source: str
    suffix: str
    rows: int
    stored: Stored
    blocks: tuple[RowSlice, ...]
    columns: slice | None
    is_decoded: bool = False
    is_stack: bool = False
    is_whole: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its full shape in the checkpoint; () also where any shape will do."""
        if self.stored.axes is None:
            return ()
        lengths = tuple(axis.length(self._each) for axis in self.stored.axes)
        return (self.module.experts, *lengths) if self.is_stack else lengths

    @property
    def _each(self) -> tuple[int, int]:
        """Rows and columns of the matrix, or of one of a stack's."""
        return self.rows // (self.module.experts if self.is_stack else 1), max(self.module.columns, 1)

    def index(self, block: RowSlice) -> tuple[slice, ...]:
        """What to read of the checkpoint's tensor for a block, in the checkpoint's own layout: of a tensor of all experts a
        piece of one."""
        if not self.stored.axes:
            return ()
        each = self._each
        expert = block.rows.start // each[0]
        first = (slice(expert, expert + 1),) if self.is_stack else ()
        if self.is_whole:
            return (*first, *(slice(0, axis.length(each)) for axis in self.stored.axes))
        parts = [axis.part(*self.part_of(block), each) for axis in self.stored.axes]
        assert all(part is not None for part in parts), f"{self.name} cannot be cut so"
        return (*first, *(part for part in parts if part is not None))

    def can_cut(self, block: RowSlice) -> bool:
        """Whether a block's values need only a part of the tensor, or all of it for all of the matrix."""
        (rows, columns), each = self.part_of(block), self._each
        is_cut = {"rows": rows != slice(0, each[0]), "columns": columns != slice(0, each[1])}
        if any(is_cut[of] for of in ("rows", "columns") if of not in self.stored.cuts):
            return False
        return all(axis.part(rows, columns, each) is not None for axis in self.stored.axes or ())

    def part_of(self, block: RowSlice) -> tuple[slice, slice]:
        """A block's rows and columns in its matrix."""
        rows, each = block.rows, self._each
        if self.is_stack:
            shift = rows.start // each[0] * each[0]
            rows = slice(rows.start - shift, rows.stop - shift, rows.step)
        return rows, slice(0, each[1]) if self.columns is None else self.columns

    def shape_to_decode(self, block: RowSlice) -> tuple[int, int]:
        """Rows and columns of a block of a matrix, or of the matrix where it is read whole."""
        rows, columns = self.part_of(block)
        each = self._each
        return each if self.is_whole else (len(range(each[0])[rows]), columns.stop - columns.start)


def sources_of(
    modules: list[Module],
    spec: DecoderSpec,
    plan: ParallelPlan,
    method: LinearMethod | None = None,
    names: Collection[str] | None = None,
) -> dict[str, CheckpointTensor]:
    """The checkpoint tensors that fill the modules, by name (with the first of the spec's prefixes).

    Args:
        names: the checkpoint's, if they are known: what is optional and not among them is left out.
    """
    prefix, method = spec.weights.prefixes[0], method or UnquantizedLinear()
    sources = {source.name: source for module in modules for source in _module_sources(module, prefix, plan, method)}
    if names is None or not any(source.stored.optional for source in sources.values()):
        return sources
    there = {canonical_name(name, sources, spec) for name in names}
    return {name: source for name, source in sources.items() if name in there or not source.stored.optional}


def names_within(names: Collection[str], spec: DecoderSpec) -> set[str]:
    """A checkpoint's names without any of the prefixes that the model's may have."""
    prefixes = sorted(spec.weights.prefixes, key=len, reverse=True)
    return {next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name) for name in names}


def with_layout_of(modules: list[Module], spec: DecoderSpec, names: Collection[str]) -> list[Module]:
    """The modules, filled from one tensor of all experts where a checkpoint with these names has one."""
    stacked = {name for module in modules for name in module.stacked}
    there = {name for name in stacked for prefix in spec.weights.prefixes if prefix + name in names}
    return [
        module.from_stacks() if module.stacked and there.issuperset(module.stacked) else module for module in modules
    ]


OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}
"""What norms' tensors are called in the first checkpoints of BERT."""


def canonical_name(name: str, sources: Mapping[str, CheckpointTensor], spec: DecoderSpec) -> str:
    """The name in `sources` that a checkpoint's name means, whichever prefix it has; itself where it means none."""
    if name in sources:
        return name
    module, _, suffix = name.rpartition(".")
    if suffix in OLD_SUFFIXES:
        return canonical_name(f"{module}.{OLD_SUFFIXES[suffix]}", sources, spec)
    first, *_ = spec.weights.prefixes
    for prefix in spec.weights.prefixes:
        within = name.removeprefix(prefix)
        if first + within in sources and name.startswith(prefix):
            return first + within
        # The head usually has no prefix, but not always.
        for outside in (within, name.removeprefix(prefix.removesuffix("model."))):
            if outside in sources:
                return outside
    found = _renamed(name, sources, spec)
    for tower in spec.towers:
        found = found if found in sources else canonical_name(name, sources, tower)
    return found


def _renamed(name: str, sources: Mapping[str, CheckpointTensor], spec: DecoderSpec) -> str:
    """The name in `sources` that one with a part of another name means; itself where it means none."""
    for theirs, ours in spec.weights.aliases.items():
        if theirs in name and (found := canonical_name(name.replace(theirs, ours), sources, spec)) in sources:
            return found
    return name


def check_names(sources: Mapping[str, CheckpointTensor], spec: DecoderSpec, names: Collection[str]) -> None:
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


def check_shapes(
    sources: Mapping[str, CheckpointTensor], spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ConfigError that lists every tensor whose shape is not what config.json asks for."""
    wrong: list[str] = []
    for name, shape in shapes.items():
        source = sources.get(canonical_name(name, sources, spec))
        if source is None or source.stored.axes is None:
            continue
        is_padded = source.module.is_padded and shape[1:] == source.shape[1:] and shape[0] > source.shape[0]
        if (
            tuple(shape) != source.shape
            and not is_padded
            and not (source.is_decoded and _is_padded(shape, source.shape))
        ):
            wrong.append(f"{name} is {list(shape)}, config.json asks for {list(source.shape)}")
    if wrong:
        raise ConfigError(f"wrong weight shapes ({len(wrong)}): {_listing(wrong, '; ')}", setting="model")


def _is_padded(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape is the wanted one with dimensions of length 1 behind it."""
    return shape[: len(wanted)] == wanted and math.prod(shape) == math.prod(wanted)


def _listing(items: list[str], separator: str = ", ", limit: int = 20) -> str:
    more = f"{separator}… and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more or "none"


CACHE_SCALES = {
    **dict.fromkeys(("k_scale", "k_proj.output_scale"), ("k_scale",)),
    **dict.fromkeys(("v_scale", "v_proj.output_scale"), ("v_scale",)),
    "kv_scale": ("k_scale", "v_scale"),
    **dict.fromkeys(("q_scale", "prob_scale", "q_proj.output_scale"), ()),
}
"""Scales of attention in float8, by how their names end, and what they are to layers: queries and weights are not rounded."""


def is_cache_scale(name: str) -> bool:
    """Whether a tensor of the checkpoint is a scale of attention in float8."""
    return name.endswith(tuple(f".{ending}" for ending in CACHE_SCALES))


def cache_scales(name: str, spec: DecoderSpec) -> list[str]:
    """What a scale of the checkpoint is to our layers: `layers.3.k_scale`, say; nothing where no layer takes it."""
    if spec.features is not None:  # heads have none
        return []
    before, after = (re.escape(part) for part in spec.weights.layer.split("{layer}"))
    found = re.search(rf"(?:^|\.){before}(\d+){after}", name)
    is_ours = is_cache_scale(name) and not _is_elsewhere(name, spec) and spec.weights.sublayers == 1
    if not is_ours or found is None or int(found[1]) >= spec.layers:
        return []
    layer, ending = int(found[1]), next(ending for ending in CACHE_SCALES if name.endswith(f".{ending}"))
    has_pages = any(type(mixer) in (Attention, MLA, SparseMLA) for mixer in spec.mixers_of(layer))
    return [f"layers.{layer}.{scale}" for scale in CACHE_SCALES[ending] if has_pages]


def is_ignored(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor of the checkpoint carries nothing to load."""
    if _is_elsewhere(name, spec) or is_cache_scale(name):
        return True
    return spec.tied_embeddings and name.endswith("lm_head.weight")


def _is_elsewhere(name: str, spec: DecoderSpec) -> bool:
    if any(_is_elsewhere(name, tower) for tower in spec.towers):
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in spec.weights.ignored)


def _module_sources(
    module: Module, prefix: str, plan: ParallelPlan, method: LinearMethod
) -> Iterator[CheckpointTensor]:
    is_stack = module.is_row or module.is_stacked
    is_bare = module.kind in ("vector", "table") or is_stack or module.is_bare
    columns = module.local_columns(plan) if module.columns else None
    is_formatted = columns and not module.plain and (module.kind != "embedding" or method.stores_embeddings)
    is_formatted = is_formatted and module.kind not in ("norm", "table")
    is_transposed = module.transposed and (is_stack or not module.stacked)
    plain = CONVOLUTION if module.is_conv else TRANSPOSED if is_transposed else PLAIN["weight"]
    plain = WHOLE_NUMBERS if module.is_whole else plain
    prefix = "" if module.name.startswith("lm_head") else prefix
    for name, (rows, blocks) in zip(module.sources, blocks_of(module, plan), strict=True):
        source = functools.partial(
            CheckpointTensor, module=module, source=name, rows=rows, blocks=blocks, columns=columns, is_stack=is_stack
        )
        stored = method.stored(name) if is_formatted else PLAIN
        decoded = [
            source(
                name=prefix + name + (suffix if is_stack else f".{suffix}"),
                suffix=suffix,
                stored=tensor,
                is_decoded=True,
            )
            for suffix, tensor in stored.items()
            if stored is not PLAIN
        ]
        is_whole = not all(each.can_cut(block) for each in decoded for block in blocks)
        yield from (dataclasses.replace(each, is_whole=is_whole) for each in decoded)
        if stored is PLAIN:
            tensor = Stored(None) if module.is_flattened else plain if columns else VECTOR
            if module.dims and not module.is_flattened:
                tensor = Stored((ROWS, *(Axis("none", entries=count) for count in module.dims)))
            yield source(name=prefix + name + ("" if is_bare else ".weight"), suffix="weight", stored=tensor)
        if module.bias and not name.endswith(module.unbiased):
            yield source(name=f"{prefix}{name}.bias", suffix="bias", stored=VECTOR, columns=None)


def blocks_of(module: Module, plan: ParallelPlan) -> list[tuple[int, tuple[RowSlice, ...]]]:
    """For each source: its rows in the checkpoint, and this rank's blocks of them."""
    if module.added_rows:
        ((rows, every),) = blocks_of(dataclasses.replace(module, added_rows=0), plan)
        there = rows - module.added_rows
        cut = (RowSlice(slice(block.rows.start, min(block.rows.stop, there)), block.at) for block in every)
        return [(there, tuple(block for block in cut if block.rows.start < block.rows.stop))]
    if module.interleaved:
        return [_interleaved_blocks(module, plan)]
    local, skip = module.local_rows(plan), module.skip_rows
    at = list(itertools.accumulate((rows.stop - rows.start for rows in local), initial=0))
    every = range(len(module.parts))
    layouts = module.layouts or (
        [SourceLayout((part,)) for part in every] if len(module.sources) == len(every) else [SourceLayout((*every,))]
    )
    if len(module.sources) != len(layouts):
        raise ValueError(f"{module.name} has {len(module.sources)} sources for {len(every)} parts")
    found: list[tuple[int, tuple[RowSlice, ...]]] = []
    for layout in layouts:
        blocks: list[RowSlice] = []
        start = skip
        for group in range(layout.groups):
            for part in layout.parts:
                share, mine = module.parts[part].rows // layout.groups, local[part]
                first, last = max(mine.start, group * share), min(mine.stop, (group + 1) * share)
                if first < last:
                    shift = start - group * share
                    blocks.append(RowSlice(slice(first + shift, last + shift), at[part] + first - mine.start))
                    if layout.twin is not None:
                        blocks.append(dataclasses.replace(blocks[-1], at=at[layout.twin] + first - mine.start))
                start += share
        found.append((start, tuple(blocks)))
    return found


def _interleaved_blocks(module: Module, plan: ParallelPlan) -> tuple[int, tuple[RowSlice, ...]]:
    """As `_blocks`, of one source in which parts 0 and 1 take turns row by row, then 2 and 3, and so on."""
    blocks: list[RowSlice] = []
    start = at = 0
    for number, (part, rows) in enumerate(zip(module.parts, module.local_rows(plan), strict=True)):
        if rows.start < rows.stop:
            blocks.append(RowSlice(slice(start + 2 * rows.start + number % 2, start + 2 * rows.stop, 2), at))
        at += rows.stop - rows.start
        start += number % 2 * 2 * part.rows
    return start, tuple(blocks)
