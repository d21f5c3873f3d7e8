"""What a model's weights are made of: matrices, norms, embeddings and vectors, and how ranks share them.

Knows names, shapes and slices; which modules a model has is listed by `decoder_layer.py`. A *module* is a matrix with its bias,
a norm, an embedding, a bare vector, or all experts' matrices of a layer under one another. What of a checkpoint fills them is
the business of `weights.py`.
"""

import dataclasses
from typing import Literal

from quire.layers.parallel import ParallelPlan
from quire.models.residual import LayerNorm, Norm
from quire.models.spec import DecoderSpec

Kind = Literal["linear", "embedding", "norm", "vector", "table", "experts"]
Shard = Literal["none", "rows", "columns", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a module that are sharded by themselves, in `groups` that stay whole (q, k and v by heads)."""

    rows: int
    groups: int


@dataclasses.dataclass(frozen=True)
class SourceLayout:
    """What one source holds: some of a module's parts, by number, in `groups`: the first group's rows of each part, then the
    second group's. `twin`: one more part that gets the same rows as the only one."""

    parts: tuple[int, ...]
    groups: int = 1
    twin: int | None = None


@dataclasses.dataclass(frozen=True)
class Module:
    """One matrix, norm, embedding or vector of the model, before sharding.

    Attributes:
        name: ours, e.g. `layers.3.qkv`.
        sources: the checkpoint's module names, without prefix; one for each part, or one for all parts, unless `layouts` (one
            for each source) say it otherwise.
        columns: of a matrix; 0 for norms and vectors.
        column_groups: groups that stay whole when columns are sharded.
        skip_rows: leading rows of the checkpoint's tensor that are not loaded.
        weight_offset: added to a norm's weight.
        plain: a matrix that stays in the model's own number type in every format (routers).
        experts: how many experts' matrices (or biases, without columns) are stacked.
        interleaved: the one source has the parts two by two, a row of one and a row of the other in turn.
        is_row: a vector that is stored as a matrix of one row.
        normalized: each row is divided by its length.
        unbiased: how the names of sources end that have no bias, though the module has one.
        bias_scale: multiplies the checkpoint's bias.
        is_whole: a table that is stored as whole numbers.
        is_conv: a table that is stored as [rows, 1, columns], a convolution of each channel by itself.
        is_flattened: the checkpoint has the tensor with more dimensions. is_bare: its name there has no `.weight` behind it.
        stacked: the names of the tensors [experts, rows, columns], one of all parts or one for each, that a checkpoint may have
            in place of the sources.
        is_padded: the checkpoint's tensor may have further rows.
        added_rows: the last rows, which it does not have: they are zeros. A module with such rows holds values, also where the
            checkpoint has it in a number format.
        dims: in the checkpoint a row has these dimensions (a convolution's), which stand here one after the other.
        absorbed: of a matrix whose heads' rows make keys and values of a latent, but which is used the other way round: how many
            rows make keys, and how many values.
        apart: heads, and values of each, of which the checkpoint has the second quarter behind the third (`Rope.in_halves`).
        fixed: why adapters cannot change it; nothing: they can, if it is a matrix.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...]
    parts: tuple[RowBlock, ...]
    columns: int = 0
    column_groups: int = 1
    bias: bool = False
    shard: Shard = "none"
    transposed: bool = False
    skip_rows: int = 0
    weight_offset: float = 0.0
    plain: bool = False
    experts: int = 1
    stacked: tuple[str, ...] = ()
    interleaved: bool = False
    is_row: bool = False
    layouts: tuple[SourceLayout, ...] = ()
    normalized: bool = False
    unbiased: tuple[str, ...] = ()
    bias_scale: float = 1.0
    is_conv: bool = False
    is_flattened: bool = False
    is_bare: bool = False
    is_whole: bool = False
    is_padded: bool = False
    added_rows: int = 0
    dims: tuple[int, ...] = ()
    absorbed: tuple[int, int] | None = None
    apart: tuple[int, int] = (0, 0)
    fixed: str = ""

    @property
    def is_quantizable(self) -> bool:
        """Whether a checkpoint may hold it in another number format: layers' matrices and that of their inputs, never the
        head."""
        is_inside = self.name.startswith("layers.") or self.name == "input_projection"
        return self.kind == "linear" and is_inside and not self.plain

    @property
    def is_stacked(self) -> bool:
        """Whether its sources are tensors of all experts."""
        return bool(self.stacked) and self.sources == self.stacked

    def from_stacks(self) -> "Module":
        """The module filled from tensors of all experts."""
        each = range(len(self.parts) // self.experts)
        layouts = [SourceLayout(tuple(range(part, len(self.parts), len(each)))) for part in each]
        return dataclasses.replace(self, sources=self.stacked, layouts=tuple(layouts) if len(self.stacked) > 1 else ())

    @property
    def rows(self) -> int:
        """All rows, before sharding."""
        return sum(part.rows for part in self.parts)

    def local_rows(self, plan: ParallelPlan) -> list[slice]:
        """This rank's rows of each part, relative to the part."""
        if self.kind == "experts" and plan.expert_parallel:
            mine, each = plan.experts(self.experts), len(self.parts) // self.experts
            return [
                slice(0, part.rows if mine.start <= number // each < mine.stop else 0)
                for number, part in enumerate(self.parts)
            ]
        if self.shard == "rows":
            return [plan.rows(part.rows, part.groups, self.name) for part in self.parts]
        if self.shard == "vocabulary":
            return [plan.vocabulary(part.rows) for part in self.parts]
        return [slice(0, part.rows) for part in self.parts]

    def local_columns(self, plan: ParallelPlan) -> slice:
        """This rank's columns."""
        if self.shard == "columns" and not (self.kind == "experts" and plan.expert_parallel):
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
class ModuleBuilder:
    """Makes the modules of one layer, or (without a layer) those outside of layers.

    A matrix's parts are its rows, in blocks that are sharded each by themselves; `groups` columns stay together.
    """

    spec: DecoderSpec
    layer: int | None = None

    @property
    def hidden(self) -> RowBlock:
        """Rows of a matrix whose outputs go to the residual."""
        return RowBlock(self.spec.hidden, 1)

    def linear(
        self,
        name: str,
        parts: tuple[RowBlock, ...],
        columns: int | None = None,
        *,
        bias: bool = False,
        shard: Shard = "none",
        groups: int = 1,
        plain: bool = False,
        layouts: tuple[SourceLayout, ...] = (),
    ) -> Module:
        """A matrix with as many columns as the model is wide, unless they are named."""
        return Module(
            self._name(name),
            "linear",
            self._sources(name),
            parts,
            self.spec.hidden if columns is None else columns,
            groups,
            bias,
            shard,
            transposed=name in self.spec.weights.transposed,
            is_bare=name in self.spec.weights.bare,
            is_flattened=name in self.spec.weights.flattened,
            interleaved=name in self.spec.weights.interleaved,
            plain=plain,
            layouts=layouts,
            unbiased=self.spec.weights.unbiased,
            bias_scale=self.spec.weights.bias_scales.get(name, 1.0),
        )

    def norm(self, name: str, norm: Norm, size: int, heads: int = 0) -> Module:
        """A norm over vectors of some size; with heads, one for each: rows of one tensor, or each a tensor of its own."""
        sources, parts, columns = self._sources(name), (RowBlock(size, 1),), 0
        has_bias = isinstance(norm, LayerNorm) and norm.bias
        if heads and "{head}" in sources[0]:
            sources, parts = tuple(sources[0].format(head=head) for head in range(heads)), parts * heads
        elif heads:
            parts, columns = (RowBlock(heads, heads),), size
        return Module(
            self._name(name), "norm", sources, parts, columns, bias=has_bias, weight_offset=norm.weight_offset
        )

    def vector(self, name: str, part: RowBlock, shard: Shard = "none") -> Module:
        """A bare tensor of one dimension."""
        weights, sources = self.spec.weights, self._sources(name)
        is_row, is_flattened = name in weights.row_vectors, name in weights.flattened
        return Module(
            self._name(name), "vector", sources, (part,), shard=shard, is_row=is_row, is_flattened=is_flattened
        )

    def table(
        self,
        name: str,
        parts: tuple[RowBlock, ...],
        columns: int = 0,
        *,
        shard: Shard = "none",
        is_conv: bool = False,
        is_whole: bool = False,
    ) -> Module:
        """A bare tensor that stays float32: one number a row, or some."""
        return Module(
            self._name(name),
            "table",
            self._sources(name),
            parts,
            columns,
            shard=shard,
            is_conv=is_conv,
            is_flattened=name in self.spec.weights.flattened,
            is_whole=is_whole,
        )

    def embedding(self, name: str, rows: int, width: int, skip_rows: int = 0) -> Module:
        """A table of rows."""
        parts = (RowBlock(rows, rows),)
        weights, sources = self.spec.weights, self._sources(name)
        return Module(
            self._name(name),
            "embedding",
            sources,
            parts,
            width,
            skip_rows=skip_rows,
            is_padded=name in weights.padded,
            is_flattened=name in weights.flattened,
            is_bare=name in weights.bare,
        )

    def layouts(self, name: str, parts: int, fused: tuple[int, ...], groups: int) -> tuple[SourceLayout, ...]:
        """How a module's sources hold its parts: each one, or one source all of them; or one fewer source than parts, of
        which the one that holds the parts in `fused` has them group by group."""
        count, weights = len(self._sources(name)), self.spec.weights
        if name in weights.by_group:
            return (SourceLayout(*weights.by_group[name]),)
        if count == 1 and name in weights.by_head:
            return (SourceLayout(tuple(range(parts)), groups),)
        if count in (1, parts):
            return ()
        alone = [SourceLayout((part,)) for part in range(parts) if part not in fused]
        return tuple(sorted([SourceLayout(fused, groups), *alone], key=lambda layout: layout.parts))

    def experts(
        self,
        name: str,
        count: int,
        parts: tuple[RowBlock, ...],
        columns: int | None = None,
        *,
        shard: Shard,
        groups: int = 1,
    ) -> Module:
        """The matrices of all experts under one another; without columns, their biases."""
        weights = self.spec.weights
        columns, named = self.spec.hidden if columns is None else columns, weights.stacked.get(name, ())
        stacked = tuple(self._prefix + source for source in ((named,) if isinstance(named, str) else named))
        is_always_stacked = not columns or (stacked and name not in weights.modules)
        if not columns:
            stacked = self._sources(name)
        sources = () if is_always_stacked else self._sources(name)
        module = Module(
            self._name(name),
            "experts",
            tuple(source.format(expert=e) for e in range(count) for source in sources),
            parts * count,
            columns,
            groups,
            shard=shard,
            experts=count,
            stacked=stacked,
            transposed=name in weights.transposed,
            interleaved=name in weights.interleaved,
        )
        return module.from_stacks() if is_always_stacked else module

    @property
    def _prefix(self) -> str:
        """The prefix of the layer's sources."""
        weights = self.spec.weights
        return "" if self.layer is None else weights.layer.format(layer=self.layer // weights.sublayers)

    def _name(self, name: str) -> str:
        return name if self.layer is None else f"layers.{self.layer}.{name}"

    def _sources(self, name: str) -> tuple[str, ...]:
        given = self.spec.weights.modules.get(name)
        if given is None:
            raise ValueError(f"the weight table has no {name!r}, which the spec needs")
        names, within = (given,) if isinstance(given, str) else given, (self.layer or 0) % self.spec.weights.sublayers
        words = self.spec.weights.sub_words
        word = words[within % len(words)]
        return tuple(
            self._prefix
            + source.replace("{sub}", str(within)).replace("{sub1}", str(within + 1)).replace("{word}", word)
            for source in names
        )
