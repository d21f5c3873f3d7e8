"""Puts a checkpoint's tensors together into the weights that layers use, each as soon as its parts are there.

Holds the parts of unfinished modules only, so that a model's weights are never in memory twice. Knows slices and number
types; knows nothing of files.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch

from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.linear import Decoded, LinearMethod
from quire.layers.modules import Module
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import CONVOLUTION, TRANSPOSED, CheckpointTensor, RowSlice


class Sliceable(Protocol):
    """A tensor, or something in a file that becomes one when it is sliced."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class NormWeight:
    """A norm's float32 weight (its offset already added) and bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


Weight: TypeAlias = LinearWeight | NormWeight | torch.Tensor | list[LinearWeight]
"""A list has one weight an expert."""


@dataclasses.dataclass
class _Matrix:
    """A block of a matrix that is stored in a format of its own: its tensors by suffix."""

    source: str
    at: int
    shape: tuple[int, int]
    missing: set[str]
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Unfinished:
    missing: set[str]
    shape: tuple[int, int]
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    staged: list[torch.Tensor] = dataclasses.field(default_factory=list)
    matrices: dict[tuple[str, int], _Matrix] = dataclasses.field(default_factory=dict)
    parts: dict[int, Decoded] = dataclasses.field(default_factory=dict)
    keeps_experts: bool = True
    has_begun: bool = False


class Assembler:
    """Takes tensors by name in any order; gives finished weights by module."""

    def __init__(
        self,
        sources: Mapping[str, CheckpointTensor],
        plan: ParallelPlan,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
    ) -> None:
        self._sources = sources
        self._plan, self._dtype, self._device, self._method = plan, dtype, device, method
        self._unfinished: dict[str, _Unfinished] = {}
        # Flat buffers to use again: first use of fresh memory costs several times the copy (0.7 against 5 GB/s here).
        self._staging: list[torch.Tensor] = []
        for source in sources.values():
            unfinished = self._unfinished.get(source.module.name)
            if unfinished is None:
                unfinished = _Unfinished(set(), source.module.local_shape(plan))
                self._unfinished[source.module.name] = unfinished
            unfinished.missing.add(source.name)
            columns = source.columns or slice(0, 0)
            unfinished.keeps_experts &= not source.module.plain and method.keeps_experts(
                source.source, columns.stop - columns.start, dtype
            )
            if not source.is_decoded:
                continue
            for block in source.blocks:
                matrix = _Matrix(source.source, block.at, source.shape_to_decode(block), set())
                unfinished.matrices.setdefault((source.source, block.at), matrix).missing.add(source.suffix)

    def missing(self) -> list[str]:
        """Names that have not come yet."""
        return sorted(name for unfinished in self._unfinished.values() for name in unfinished.missing)

    def missing_of_begun(self) -> list[str]:
        """Names that have not come yet of modules of which something came."""
        begun = (unfinished for unfinished in self._unfinished.values() if unfinished.has_begun)
        return sorted(name for unfinished in begun for name in unfinished.missing)

    def awaits(self, name: str) -> bool:
        """Whether a tensor has not come yet."""
        unfinished = self._unfinished.get(self._sources[name].module.name)
        return unfinished is not None and name in unfinished.missing

    def add(self, name: str, tensor: Sliceable) -> tuple[Module, Weight] | None:
        """Take one tensor; returns the module that it completes, with its weight."""
        source = self._sources[name]
        unfinished = self._unfinished[source.module.name]
        unfinished.missing.discard(name)
        unfinished.has_begun = True
        if source.is_decoded:
            self._decode(source, tensor, unfinished)
        elif source.suffix != "bias" or source.module.has_bias_on(self._plan):
            for block in source.blocks:
                self._place(source, _piece(source, tensor, block), block.at, unfinished)
        if unfinished.missing:
            return None
        del self._unfinished[source.module.name]
        weight = self._finish(source.module, unfinished)
        if isinstance(weight, LinearWeight) and weight.data is None:  # packed: the plain layout is not used any more
            self._staging.extend(unfinished.staged)
        return source.module, weight

    def _place(self, source: CheckpointTensor, piece: torch.Tensor, at: int, unfinished: _Unfinished) -> None:
        """Rows in the module's own type, at their place among the module's."""
        dtype, tensors = self._dtype_of(source), unfinished.tensors
        suffix = "bias" if source.suffix == "bias" else "weight"
        shape = unfinished.shape[:1] if source.columns is None else unfinished.shape
        is_ready = piece.dtype == dtype and piece.device == self._device and piece.is_contiguous()
        if piece.shape == shape and is_ready:  # the whole module in one piece: no copy
            tensors[suffix] = piece
            return
        if suffix not in tensors:
            tensors[suffix] = self._buffer(shape, dtype, unfinished)
            if (source.module.unbiased and suffix == "bias") or source.module.added_rows:
                tensors[suffix].zero_()
        tensors[suffix][at : at + piece.shape[0]].copy_(piece)

    def _decode(self, source: CheckpointTensor, tensor: Sliceable, unfinished: _Unfinished) -> None:
        """Take what belongs to a matrix in a format of its own; the last of its tensors makes it a part of the module."""
        for block in source.blocks:
            matrix = unfinished.matrices[source.source, block.at]
            matrix.tensors[source.suffix] = _piece(source, tensor, block).to(self._device)
            matrix.missing.discard(source.suffix)
            if matrix.missing:
                continue
            del unfinished.matrices[source.source, block.at]
            part = self._method.decode(matrix.source, matrix.tensors, matrix.shape, self._dtype)
            if source.is_whole:
                part = self._method.cut(part, *source.part_of(block))
            keeps = source.module.kind == "linear" or (source.module.kind == "experts" and unfinished.keeps_experts)
            if source.module.added_rows or not keeps:
                self._place(source, self._method.dense(part, self._dtype), block.at, unfinished)
            else:
                unfinished.parts[block.at] = part

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, unfinished: _Unfinished) -> torch.Tensor:
        count = math.prod(shape)
        fitting = [flat for flat in self._staging if flat.dtype == dtype and flat.shape[0] >= count]
        if fitting:
            flat = min(fitting, key=lambda buffer: buffer.shape[0])
            self._staging = [buffer for buffer in self._staging if buffer is not flat]
        else:
            flat = torch.empty(count, dtype=dtype, device=self._device)
        if len(shape) == 2:
            unfinished.staged.append(flat)
        return flat[:count].view(shape)

    def _dtype_of(self, source: CheckpointTensor) -> torch.dtype:
        is_matrix = (
            source.module.columns > 0 and source.module.kind not in ("norm", "table") and source.suffix != "bias"
        )
        return self._dtype if is_matrix else torch.float32

    def _finish(self, module: Module, unfinished: _Unfinished) -> Weight:
        tensors = unfinished.tensors
        bias = tensors.pop("bias", None)
        if bias is not None and module.bias_scale != 1.0:
            bias = bias * module.bias_scale
        if module.kind == "experts":
            return self._finish_experts(module, unfinished)
        if module.apart != (0, 0):
            tensors["weight"] = _joined_quarters(tensors["weight"], *module.apart)
        if unfinished.parts:
            # Of a module only some of whose matrices have a format of their own, the others are parts as they are.
            if "weight" in tensors:
                unfinished.parts.update(self._plain_parts(unfinished))
            return self._method.join([unfinished.parts[at] for at in sorted(unfinished.parts)], bias, self._dtype)
        if module.is_quantizable:
            return self._method.create(tensors["weight"], bias, self._dtype)
        if module.kind in ("linear", "embedding"):
            weight = tensors["weight"]
            return ops.pack_linear(torch.nn.functional.normalize(weight) if module.normalized else weight, bias)
        if module.kind == "norm":
            weight = tensors["weight"]
            return NormWeight(weight + module.weight_offset if module.weight_offset else weight, bias)
        return tensors["weight"]

    def _finish_experts(self, module: Module, unfinished: _Unfinished) -> Weight:
        mine = self._plan.experts(module.experts)
        count = mine.stop - mine.start
        experts: list[list[Decoded]] = [[] for _ in range(count)]
        if not unfinished.parts:
            stacked = unfinished.tensors["weight"].unflatten(0, (count, -1))
            if not (module.columns and unfinished.keeps_experts):
                return stacked
            experts = [[matrix] for matrix in stacked]
        for at in sorted(unfinished.parts):
            experts[at * count // unfinished.shape[0]].append(unfinished.parts.pop(at))
        return [self._method.join_expert(experts.pop(0), self._dtype) for _ in range(count)]

    def _plain_parts(self, unfinished: _Unfinished) -> dict[int, torch.Tensor]:
        """Stretches of rows that no part in a format of its own covers."""
        weight_NK, plain, start = unfinished.tensors["weight"], {}, 0
        for at in [*sorted(unfinished.parts), unfinished.shape[0]]:
            if at > start:
                plain[start] = weight_NK[start:at].clone()
            part = unfinished.parts.get(at)
            start = at + (0 if part is None else part.shape[0] if isinstance(part, torch.Tensor) else part.out_features)
        return plain


def _joined_quarters(rows: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """A tensor whose first rows are so many heads of some size: each head's second and third quarter change places."""
    turned, others = rows.split((heads * size, len(rows) - heads * size))
    quarters = turned.unflatten(0, (heads, 2, 2, size // 4)).transpose(1, 2)
    return torch.cat((quarters.flatten(0, 3), others))


def _piece(source: CheckpointTensor, tensor: Sliceable, block: RowSlice) -> torch.Tensor:
    """What a block has of a tensor."""
    piece = tensor[source.index(block)]
    if source.is_stack:  # one expert's part of a tensor of all
        piece = piece[0]
    if source.is_decoded:
        return piece
    if source.module.is_flattened and source.stored.axes is None:
        return piece.reshape(source.rows, *([source.module.columns] if source.module.columns else []))[block.rows]
    if source.module.dims and source.suffix != "bias":
        return piece.flatten(1)
    return piece.t() if source.stored is TRANSPOSED else piece[:, 0] if source.stored is CONVOLUTION else piece
