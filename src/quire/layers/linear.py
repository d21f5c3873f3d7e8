"""The door through which a linear layer's weight comes and is used: one method a number format.

A method knows which tensors a checkpoint holds for a matrix, how they become a `LinearWeight`, and which kernel multiplies it.
The layer that owns the weight knows none of it.
"""

import abc
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from quire.config.hf_config import HFConfig
from quire.kernels import ops
from quire.kernels.types import ExpertCodes, LinearWeight
from quire.platforms.interface import Capabilities

WHOLE = 1 << 62
"""More rows or columns than any matrix has: one entry covers all of them."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of a tensor in a checkpoint, in terms of the matrix that it belongs to.

    Attributes:
        of: `rows` or `columns` of the matrix; `values`, row by row; `none`: always as long as `entries`.
        per: so many of them ...
        entries: ... take so many entries of this dimension.
        is_stream: entries are one stream of bits: the last entry may cover fewer values.
        is_packed: an entry holds a value for each of them, rather than one that they share; so do streams, and several entries.
    """

    of: Literal["rows", "columns", "values", "none"]
    per: int = 1
    entries: int = 1
    is_stream: bool = False
    is_packed: bool = False

    def length(self, shape: tuple[int, int]) -> int:
        """Entries for a matrix of some shape."""
        size = {"rows": shape[0], "columns": shape[1], "values": shape[0] * shape[1], "none": 1}[self.of]
        return -(-size * self.entries // self.per) if self.is_stream else -(-size // self.per) * self.entries

    def part(self, rows: slice, columns: slice, shape: tuple[int, int]) -> slice | None:
        """The entries of a part of a matrix of some shape; None where it begins or ends within one entry."""
        if self.of == "none":
            return slice(0, self.entries)
        size, part = (shape[0], rows) if self.of == "rows" else (shape[1], columns)
        if self.of == "values":
            if columns != slice(0, shape[1]):
                return None
            size, part = shape[0] * shape[1], slice(rows.start * shape[1], rows.stop * shape[1])
        if self.per >= size and not (self.is_packed or self.is_stream or self.entries > 1):
            return slice(0, 1)
        if part.step is not None:
            return part if self.per == self.entries == 1 else None
        if part.start % self.per or (part.stop % self.per and part.stop != size):
            return None
        last = self.length(shape) if part.stop == size else part.stop // self.per * self.entries
        return slice(part.start // self.per * self.entries, last)


ROWS, COLUMNS = Axis("rows"), Axis("columns")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One of the tensors that a checkpoint holds for a matrix.

    Attributes:
        axes: its dimensions (more of length 1 may follow); () is one number, None any shape, read whole.
        dtypes: it must be of one of these types; None: of any plain floating-point one.
        optional: a checkpoint may lack it.
        cuts: along what a part of the matrix needs only a part of it.
    """

    axes: tuple[Axis, ...] | None = (ROWS, COLUMNS)
    dtypes: tuple[torch.dtype, ...] | None = None
    optional: bool = False
    cuts: tuple[Literal["rows", "columns"], ...] = ("rows", "columns")


PLAIN: Mapping[str, Stored] = {"weight": Stored()}
"""A matrix in a plain floating-point type."""

Decoded: TypeAlias = LinearWeight | torch.Tensor
"""(RowBlock of) a matrix: as a kernel takes it, or plain [N, K]."""


class Products(abc.ABC):
    """How weights of one type are multiplied."""

    @abc.abstractmethod
    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        """out = x @ weight.T + bias."""

    # What a layer does around its matrices; a format overrides these where it can do it in fewer passes.

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        """out = rms_norm(x) @ weight.T + bias. `scratch` has x's shape and may be overwritten."""
        ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
        self.apply(scratch_TD, weight, out_TN)

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
        """out = act(gate) * up of rms_norm(x) @ weight.T + bias. Both scratches may be overwritten."""
        self.apply_normed(x_TD, norm_D, eps, weight, scratch_T2I, scratch_TD)
        ops.gated_activation(scratch_T2I, kind, out_TI)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        """residual += x @ weight.T + bias. `scratch` has the residual's shape and may be overwritten."""
        self.apply(x_TK, weight, scratch_TN)
        ops.add(scratch_TN, residual_TN)

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
        """residual += down(act(gate) * up), with gate and up of rms_norm(residual). All but the residual may be overwritten."""
        self.apply_normed_gated(residual_TD, norm_D, eps, gate_up, kind, narrow_TI, scratch_TD, scratch_T2I)
        self.apply_add(narrow_TI, down, residual_TD, delta_TD)


class PlainProducts(Products):
    """Products of matrices in the model's own type."""

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        ops.linear(x_TK, weight, out_TN)

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        ops.norm_linear(x_TD, norm_D, eps, weight, out_TN, scratch_TD)

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
        ops.norm_linear_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        ops.linear_add(x_TK, weight, residual_TN)


class LinearMethod(Products):
    """One format of linear weights."""

    name: str

    stores_embeddings = False
    """Whether `stored` is asked for embeddings too, rather than for layers' matrices, experts and the head."""

    @classmethod
    def from_config(cls, stored: HFConfig | None) -> "LinearMethod":
        """The method for a checkpoint that describes itself so (`quantization_config`), or for a plain one (None)."""
        return cls()

    def on_device(self, capabilities: Capabilities) -> None:
        """Learn what the device can do.

        Raises:
            ConfigError: it cannot compute with this format.
        """

    # What a checkpoint holds, and how a weight is made of it.

    def see_names(self, names: Collection[str]) -> None:
        """Learn the checkpoint's names, without the model's prefix, before `stored` is asked for what is to be read."""

    def stored(self, source: str) -> Mapping[str, Stored]:
        """What the checkpoint holds for a matrix (its name without the model's prefix) besides its bias, by suffix."""
        return PLAIN

    def decode(
        self, source: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Decoded:
        """Rows and columns of a matrix that is not stored as `PLAIN`.

        Args:
            tensors: by suffix, the part of each that belongs to these rows and columns.
            shape: how many rows and columns they are.
        """
        raise ValueError(f"{self.name} cannot be read from a checkpoint")

    def dense(self, part: Decoded, dtype: torch.dtype) -> torch.Tensor:
        """What `decode` gave as a plain matrix [N, K]."""
        raise ValueError(f"{self.name} cannot be read from a checkpoint")

    def cut(self, part: Decoded, rows: slice, columns: slice) -> Decoded:
        """Rows and columns of what `decode` gave for a whole matrix."""
        raise ValueError(f"{self.name} cannot be read from a checkpoint")

    def join(self, parts: Sequence[Decoded], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """One weight of parts, one below the other."""
        raise ValueError(f"{self.name} cannot be read from a checkpoint")

    def keeps_experts(self, source: str, columns: int, dtype: torch.dtype) -> bool:
        """Whether experts that are stored so, with so many columns, are weights by themselves, not plain in one tensor."""
        return False

    def join_expert(self, parts: Sequence[Decoded], dtype: torch.dtype) -> LinearWeight:
        """One expert's weight of parts, one below the other, in the layout that all kernels know."""
        raise ValueError(f"{self.name} cannot be read from a checkpoint")

    def ready_experts(
        self, experts: list[LinearWeight], *, is_gated: bool
    ) -> list[LinearWeight] | ExpertCodes | torch.Tensor:
        """What a mixture computes with: a weight an expert, or all experts' codes, or plain values in one tensor.

        Args:
            experts: what `join_expert` gave; may be emptied one by one, so that no more than one is in memory twice.
            is_gated: an expert's upper half is a gate's.
        """
        return experts

    def describe_experts(self, source: str, columns: int, dtype: torch.dtype) -> str:
        """How experts are stored or made, and why they become plain if they do, for people."""
        return self.describe(source)

    @abc.abstractmethod
    def create(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """A layer's weight from a plain matrix, which may be dropped or kept."""

    @abc.abstractmethod
    def weight_bytes(self, sources: Sequence[str], out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Device memory of one weight that holds these matrices, one below the other."""

    def describe(self, source: str) -> str:
        """How a matrix is stored or made, for people."""
        return self.name

    def notes(self) -> list[str]:
        """What a user should know of the weights that were made, a sentence each."""
        return []

    def reserve(self, max_tokens: int, max_inputs: int, device: torch.device) -> None:
        """Allocate what products need besides their operands; called once, before the first."""

    @property
    def scratch_bytes(self) -> int:
        """Device memory that `reserve` took."""
        return 0

    def bound(self, name: str, bounds_P4: torch.Tensor, rows: Sequence[int]) -> None:
        """Keep what each of a matrix's parts, of so many rows, reads and gives within bounds: the least and the most of both."""
        raise ValueError(f"{self.name} has no bounds")

    # What adapters need to know (`lora/method.py`); a format by itself has none.

    def see_rows(self, *, are_samples: bool) -> None:
        """From now on rows are a step's tokens, or those of them that need logits."""

    def adapt_embedding(self, ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float) -> None:
        """Add what adapters change about embeddings, which were multiplied by a scale."""

    def adapt_keys(self, ids_T: torch.Tensor, weight: LinearWeight, qkv_TN: torch.Tensor) -> None:
        """Put keys and values that adapters give to virtual tokens in the place of a matrix' own, before norms and rotation."""

    has_adapters = False
    """Whether steps may have adapters."""

    def adapt_residual(self, name: str, x_TD: torch.Tensor) -> None:
        """Change what a layer has made of the residual, in place."""

    def adapts(self, name: str) -> bool:
        """Whether adapters change a matrix, or several that are used each by itself, in the step that is computed."""
        return False

    def adapt_heads(self, name: str, x_TFK: torch.Tensor, out_TFN: torch.Tensor) -> None:
        """Add what adapters change about the products of each token with F matrices, one for each head."""

    def adapt_one(
        self, name: str, number: int, x_SK: torch.Tensor, index_S: torch.Tensor, out_SN: torch.Tensor
    ) -> None:
        """Add what adapters change about the product of some tokens (their places in the step) with one of several matrices."""


class UnquantizedLinear(PlainProducts, LinearMethod):
    """Matrices in the model's own type."""

    name = "unquantized"

    def create(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        return ops.pack_linear(weight_NK.to(dtype), bias_N)

    def weight_bytes(self, sources: Sequence[str], out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize


class BoundedLinear(UnquantizedLinear):
    """Products by themselves, so that bounds stand around each; a part whose inputs have other bounds is computed apart."""

    apply_normed = Products.apply_normed
    apply_normed_gated = Products.apply_normed_gated
    apply_add = Products.apply_add

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[slice, list[float]]]] = {}

    def bound(self, name: str, bounds_P4: torch.Tensor, rows: Sequence[int]) -> None:
        ends = list(itertools.accumulate(rows, initial=0))
        self._parts[name] = list(zip(map(slice, ends, ends[1:]), bounds_P4.view(-1, 4).tolist(), strict=True))

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        parts, within, product_TN = self._parts.get(weight.name), list[float](), out_TN
        if parts is None:
            ops.linear(x_TK, weight, out_TN)
            return
        for rows, (low, high, least, most) in parts:
            if within != [low, high]:
                product_TN, within = torch.empty_like(out_TN), [low, high]
                ops.linear(x_TK.clamp(low, high), weight, product_TN)
            torch.clamp(product_TN[:, rows], least, most, out=out_TN[:, rows])
