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
from quire.kernels.ops import LinearWeight
from quire.layers.linear import LinearMethod
from quire.layers.parallel import ParallelPlan
from quire.models.modules import Module
from quire.models.weights import Source


class Sliceable(Protocol):
    """A tensor, or something in a file that becomes one when it is sliced."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class NormWeight:
    """A norm's float32 weight (its offset already added) and bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


Weight: TypeAlias = LinearWeight | NormWeight | torch.Tensor


@dataclasses.dataclass
class _Unfinished:
    missing: set[str]
    shape: tuple[int, int]
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    staged: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Assembler:
    """Takes tensors by name in any order; gives finished weights by module."""

    def __init__(
        self,
        sources: Mapping[str, Source],
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

    def missing(self) -> list[str]:
        """Names that have not come yet."""
        return sorted(name for unfinished in self._unfinished.values() for name in unfinished.missing)

    def add(self, name: str, tensor: Sliceable) -> tuple[Module, Weight] | None:
        """Take one tensor; returns the module that it completes, with its weight."""
        source = self._sources[name]
        unfinished = self._unfinished[source.module.name]
        unfinished.missing.discard(name)
        if source.suffix != "bias" or source.module.has_bias_on(self._plan):
            self._place(source, tensor, unfinished)
        if unfinished.missing:
            return None
        del self._unfinished[source.module.name]
        weight = self._finish(source.module, unfinished.tensors)
        if isinstance(weight, LinearWeight) and weight.data is None:  # packed: nobody holds the plain layout any more
            self._staging.extend(unfinished.staged)
        return source.module, weight

    def _place(self, source: Source, tensor: Sliceable, unfinished: _Unfinished) -> None:
        module, dtype, tensors = source.module, self._dtype_of(source), unfinished.tensors
        if source.is_scale:
            self._place_scale(source, tensor, unfinished)
            return
        shape = unfinished.shape[:1] if source.columns is None else unfinished.shape
        for block in source.blocks:
            piece = tensor[source.index(block)]
            piece = piece[0] if source.is_stack else piece
            piece = piece.t() if module.transposed and piece.dim() == 2 else piece
            is_ready = piece.dtype == dtype and piece.device == self._device and piece.is_contiguous()
            if piece.shape == shape and is_ready:  # the whole module in one piece: no copy
                tensors[source.suffix] = piece
                continue
            if source.suffix not in tensors:
                tensors[source.suffix] = self._buffer(shape, dtype, unfinished)
            tensors[source.suffix][block.at : block.at + piece.shape[0]].copy_(piece)

    def _place_scale(self, source: Source, tensor: Sliceable, unfinished: _Unfinished) -> None:
        """One number a row, also where the checkpoint has one for all."""
        rows = unfinished.shape[0]
        if source.suffix not in unfinished.tensors:
            unfinished.tensors[source.suffix] = torch.empty(rows, dtype=torch.float32, device=self._device)
        scale = unfinished.tensors[source.suffix]
        for block in source.blocks:
            count = block.rows.stop - block.rows.start
            scale[block.at : block.at + count].copy_(tensor[source.index(block)].reshape(-1))

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

    def _dtype_of(self, source: Source) -> torch.dtype:
        if source.module.is_quantizable and source.suffix != "bias":
            return self._method.of_module(source.module.sources).stored_dtype(source.suffix, self._dtype)
        is_matrix = source.module.columns > 0 and source.module.kind != "norm" and source.suffix != "bias"
        return self._dtype if is_matrix else torch.float32

    def _finish(self, module: Module, tensors: dict[str, torch.Tensor]) -> Weight:
        bias = tensors.pop("bias", None)
        if module.is_quantizable:
            return self._method.of_module(module.sources).create(tensors, bias, self._dtype)
        if module.kind in ("linear", "embedding"):
            weight = tensors["weight"]
            return ops.pack_linear(torch.nn.functional.normalize(weight) if module.normalized else weight, bias)
        if module.kind == "norm":
            weight = tensors["weight"]
            return NormWeight(weight + module.weight_offset if module.weight_offset else weight, bias)
        if module.kind == "experts":
            mine = self._plan.experts(module.experts)
            return tensors["weight"].unflatten(0, (mine.stop - mine.start, -1))
        return tensors["weight"]
