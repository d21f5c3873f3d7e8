"""Products of matrices with adapters: any number format's products, and behind each the updates of the rows' adapters.

A step without adapters runs the format's own products. Knows tables by the names of matrices; knows nothing of requests.
Legend: T rows, K inputs, N outputs, D hidden, I intermediate, F matrices of one shape, S rows of one of them.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch

from quire.kernels import ops, recurrent
from quire.kernels.adapters import GROUP, AdapterRows, AdapterTable
from quire.kernels.types import LinearWeight
from quire.layers.linear import LinearMethod, Products

PART, MOST_PARTS, PROGRAMS = 256, 16, 256
"""Inputs of a part of a sum; the most parts; and how many groups of rows times parts are enough to keep a device busy."""


INPUTS, RESIDUAL, KEYS = " inputs", " residual", " keys"
"""What stands behind the name of a matrix for a table that changes what it reads; behind that of a layer, what it gives; behind
that of queries, keys and values, those that virtual tokens have."""


class Adapters:
    """What the products of one model read.

    Attributes:
        tables: by module; those that no adapter changes are left out.
        is_active: whether the step that is run, or recorded, has adapters. has_samples: its rows are those that need logits, from
            now on.
        tokens, samples: the rows of a step, and those that need logits.
        scratch: float32, room for what rows are between both products.
        max_rank: the largest rank that there is room for.
        is_deterministic: sums are made of the same parts in every batch.
        can_replay: the host need not look at results in the middle of a step.
    """

    def __init__(self) -> None:
        self.tables: dict[str, AdapterTable] = {}
        self.is_active = False
        self.has_samples = False
        self.tokens: AdapterRows | None = None
        self.samples: AdapterRows | None = None
        self.scratch = torch.empty(0)
        self.max_rank = 0
        self.is_deterministic, self.can_replay = False, True
        self._of_heads: dict[int, AdapterRows] = {}

    def begin(self, *, are_samples: bool) -> None:
        """What is computed from now on."""
        self.has_samples = are_samples
        self._of_heads = {}

    def named(self, name: str) -> AdapterTable | None:
        """A matrix's table by its name, in a step with adapters."""
        return self.tables.get(name) if self.is_active else None

    @property
    def rows(self) -> AdapterRows:
        """Those that are computed now."""
        rows = self.samples if self.has_samples else self.tokens
        assert rows is not None, "no adapters were prepared"
        return rows

    def rows_of_heads(self, table: AdapterTable, tokens: int) -> AdapterRows:
        """A row for each token and matrix of a table."""
        if table.fan not in self._of_heads:
            self._of_heads[table.fan] = self.rows.of_heads(table, tokens)
        return self._of_heads[table.fan]

    def room(self, count: int, table: AdapterTable, inputs: int = 0) -> torch.Tensor:
        """[P, count, H] of the scratch; always at the same place, and with rows of the same length for a table. Where rows are
        grouped, few rows with many inputs are summed in parts."""
        width, parts = table.num_segments * self.max_rank, 1
        if inputs and self.tokens is not None and self.tokens.groups_G3 is not None:
            programs = 0 if self.is_deterministic else PROGRAMS // -(-max(1, count) // GROUP)
            parts = max(1, min(inputs // PART, len(self.scratch) // max(1, count * width), MOST_PARTS, programs))
        return self.scratch[: parts * count * width].view(parts, count, width)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Products of the base alone."""
        was_active, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = was_active


class AdaptedProducts(LinearMethod):
    """Comes before a format's class, whose products it completes."""

    adapters: Adapters
    has_adapters = True

    def see_rows(self, *, are_samples: bool) -> None:
        self.adapters.begin(are_samples=are_samples)

    def _adapt(
        self, x_TK: torch.Tensor, table: AdapterTable, out_TN: torch.Tensor, rows: AdapterRows | None = None
    ) -> None:
        rows = rows or self.adapters.rows
        ops.adapter_expand(self._shrink(x_TK, table, rows), rows, table, out_TN)

    def _shrink(self, x_TK: torch.Tensor, table: AdapterTable, rows: AdapterRows) -> torch.Tensor:
        """What `adapter_expand` takes. Before the base's product, whose matrix a GPU fetches meanwhile."""
        h_PTH = self.adapters.room(len(x_TK), table, x_TK.shape[1])
        ops.adapter_shrink(x_TK, rows, table, h_PTH)
        return h_PTH

    def adapts(self, name: str) -> bool:
        return self.adapters.named(name) is not None

    def adapt_heads(self, name: str, x_TFK: torch.Tensor, out_TFN: torch.Tensor) -> None:
        table = self.adapters.named(name)
        if table is not None:
            rows = self.adapters.rows_of_heads(table, len(x_TFK))
            update_XN = x_TFK.new_zeros(rows.slots_T.shape[0], out_TFN.shape[2])
            self._adapt(x_TFK.reshape(len(update_XN), -1).contiguous(), table, update_XN, rows)
            out_TFN.add_(update_XN.view(out_TFN.shape))

    def adapt_one(
        self, name: str, number: int, x_SK: torch.Tensor, index_S: torch.Tensor, out_SN: torch.Tensor
    ) -> None:
        table = self.adapters.named(name)
        if table is not None:
            self._adapt(x_SK, table, out_SN, self.adapters.rows.of_one(index_S, table, number))

    def adapt_embedding(self, ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float) -> None:
        self._look_up(ids_T, self.adapters.named(weight.name), out_TD, scale)

    def adapt_keys(self, ids_T: torch.Tensor, weight: LinearWeight, qkv_TN: torch.Tensor) -> None:
        self._look_up(ids_T, self.adapters.named(weight.name + KEYS), qkv_TN)

    def _look_up(
        self, ids_T: torch.Tensor, table: AdapterTable | None, out_TN: torch.Tensor, scale: float = 1.0
    ) -> None:
        """Add updates that are known by tokens' ids."""
        if table is not None:
            h_PTH = self.adapters.room(len(out_TN), table)
            ops.adapter_lookup(ids_T[: len(out_TN)], self.adapters.rows, table, h_PTH)
            ops.adapter_expand(h_PTH, self.adapters.rows, table, out_TN, scale)

    def adapt_residual(self, name: str, x_TD: torch.Tensor) -> None:
        self._stretch(x_TD, self.adapters.named(name + RESIDUAL))

    def _stretch(self, x_TK: torch.Tensor, table: AdapterTable | None) -> None:
        """Multiply rows by their adapters' vectors, and add others, in place."""
        if table is not None:
            ops.adapter_expand(self.adapters.room(len(x_TK), table), self.adapters.rows, table, x_TK)

    def _changes(self, weight: LinearWeight) -> bool:
        adapters, name = self.adapters, weight.name
        return adapters.named(name) is not None or adapters.named(name + INPUTS) is not None

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        inputs = self.adapters.named(weight.name + INPUTS)
        if inputs is not None:
            given_TK, x_TK = x_TK, torch.empty_like(x_TK)
            recurrent.scale_columns(given_TK, None, x_TK)
            self._stretch(x_TK, inputs)
        table = self.adapters.named(weight.name)
        if table is None:
            super().apply(x_TK, weight, out_TN)
            return
        h_PTH = self._shrink(x_TK, table, self.adapters.rows)
        super().apply(x_TK, weight, out_TN)
        ops.adapter_expand(h_PTH, self.adapters.rows, table, out_TN)

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        if not self._changes(weight):
            super().apply_normed(x_TD, norm_D, eps, weight, out_TN, scratch_TD)
        else:
            Products.apply_normed(self, x_TD, norm_D, eps, weight, out_TN, scratch_TD)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        if not self._changes(weight):
            super().apply_normed_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)
        else:
            Products.apply_normed_gated(self, x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        table = self.adapters.named(weight.name)
        if not self._changes(weight):
            super().apply_add(x_TK, weight, residual_TN, scratch_TN)
            return
        if table is None or table.has_gains or self.adapts(weight.name + INPUTS):
            Products.apply_add(self, x_TK, weight, residual_TN, scratch_TN)
            return
        h_PTH = self._shrink(x_TK, table, self.adapters.rows)
        with self.adapters.paused():
            super().apply_add(x_TK, weight, residual_TN, scratch_TN)
        ops.adapter_expand(h_PTH, self.adapters.rows, table, residual_TN)

    def apply_gated_mlp(
        self,
        residual_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        gate_up: LinearWeight,
        kind: str,
        down: LinearWeight,
        narrow_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:
        if not (self._changes(gate_up) or self._changes(down)):
            super().apply_gated_mlp(
                residual_TD, norm_D, eps, gate_up, kind, down, narrow_TI, scratch_TD, scratch_T2I, delta_TD
            )
        else:
            Products.apply_gated_mlp(
                self, residual_TD, norm_D, eps, gate_up, kind, down, narrow_TI, scratch_TD, scratch_T2I, delta_TD
            )


MethodT = TypeVar("MethodT", bound=LinearMethod)


def adapted(method: MethodT) -> MethodT:
    """The same number format, whose products also add the updates of adapters (`AdaptedProducts.adapters`)."""
    kind, copied = type(method), cast(Any, copy.copy(method))
    copied.__class__ = type(f"Adapted{kind.__name__}", (AdaptedProducts, kind), {})
    copied.adapters = Adapters()
    return copied
