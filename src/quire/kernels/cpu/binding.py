"""How an operation is bound to the native library: which kernel it is, where its tensors lie, and that it runs.

Knows pointers and panels; knows nothing of what an operation computes.
Legend: M matrices, N outputs, K inputs.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu.library import DTYPES, library, load
from quire.kernels.registry import kernel

PRIORITY = 10
PANEL = 16
"""Outputs of a panel: what the native kernels read of a matrix together."""


def _unavailable() -> str | None:
    """Why the library cannot serve, or None."""
    found, why = load()
    return None if found is not None else why


def cpu_kernel(op: str, *, below: int = 0, invariant: bool = True, tolerance: float = 0.0):
    """Decorator: the CPU's implementation of `op`, or one that is `below` others."""
    return kernel(
        op,
        platform="cpu",
        priority=PRIORITY - below,
        unavailable=_unavailable,
        invariant=invariant,
        needs_scratch=False,
        tolerance=tolerance,
    )


def run(operation: str, arguments: ctypes.Structure, rows: int, *tensors: torch.Tensor | None) -> None:
    """Run or record an operation on so many rows; `tensors` are what the arguments point to."""
    lib = library()
    lib.run(lib.operation(operation), arguments, rows, tensors)


def structure(name: str, *first: tuple[str, type], **kinds: str) -> type[ctypes.Structure]:
    """An argument structure, field by field as `csrc/` declares it, in the order of the keywords, after those of `first`.

    Args:
        kinds: `pointers`, `longs` (64 bits), `ints` (32) or `floats`: names of the fields of that type, by spaces.
    """
    types = {"pointers": ctypes.c_void_p, "longs": ctypes.c_int64, "ints": ctypes.c_int32, "floats": ctypes.c_float}
    fields = [*first, *((field, types[kind]) for kind, names in kinds.items() for field in names.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def address(tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous tensor.

    Raises:
        ValueError: another type or device, or gaps.
    """
    if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be a contiguous CPU tensor of {dtype}; it is {tensor.dtype} on {tensor.device}"
            f" with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _rows_address(tensor: torch.Tensor, name: str) -> int:
    """The address of float32 rows, which may lie apart: a row's values lie side by side."""
    inner = tensor.shape[1:]
    is_side_by_side = tensor.is_contiguous() or all(
        size == 1 or tensor.stride(axis + 1) == math.prod(inner[axis + 1 :]) for axis, size in enumerate(inner)
    )
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or not is_side_by_side:
        raise ValueError(
            f"{name} must be a CPU tensor of torch.float32 whose rows are contiguous; it is {tensor.dtype} on"
            f" {tensor.device}, {list(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


_ADDRESSES: dict[str, Callable[[torch.Tensor, str], int]] = {
    "": address,
    "int": functools.partial(address, dtype=torch.int32),
    "long": functools.partial(address, dtype=torch.int64),
    "rows": _rows_address,
    "any": lambda tensor, name: tensor.data_ptr(),
}
_BATCH = ("query_start", "seq_lens", "rows", "block_table", "shape")
"""Tensors of a step's metadata, as `csrc/` has them at the beginning of operations with states."""


class Operation:
    """A native operation: called with its arguments by name, it runs or is recorded.

    Args:
        pointers: as `structure` has them, each with what its tensor must be: contiguous float32 values (nothing), `name:int`,
            `name:long` (contiguous), `name:rows` (float32 rows that may lie apart, by what a field `name_stride` gets) or
            `name:any`. A tensor may be None, or left out.
        has_batch: the description of the step comes first; it is given as `metadata`.
    """

    def __init__(self, name: str, pointers: str, *, has_batch: bool = False, **kinds: str) -> None:
        words = [word.partition(":") for word in pointers.split()]
        strides = {field: f"{field}_stride" for field, _, kind in words if kind == "rows"}
        self._pointers = [(field, _ADDRESSES[kind], strides.get(field)) for field, _, kind in words]
        first = [(f"batch_{field}", ctypes.c_void_p) for field in _BATCH] if has_batch else []
        if has_batch:
            first += [("block_size", ctypes.c_int64), ("block_table_stride", ctypes.c_int64)]
        self._name, self._structure = (
            name,
            structure(name, *first, pointers=" ".join(field for field, *_ in words), **kinds),
        )

    def __call__(self, rows: int, metadata: AttentionMetadata | None = None, /, **given: Any) -> None:
        """Run or record it on so many rows."""
        tensors: list[torch.Tensor] = []
        for field, find, stride in self._pointers:
            tensor = given.get(field)
            if tensor is not None:
                tensors.append(tensor)
                given[field] = find(tensor, field)
                if stride is not None:
                    given[stride] = tensor.stride(0)
        if metadata is not None:
            step = {f"batch_{field}": getattr(metadata, field) for field in _BATCH}
            given |= {field: tensor.data_ptr() for field, tensor in step.items()}
            given |= {"block_size": metadata.block_size, "block_table_stride": metadata.block_table.stride(0)}
            tensors += step.values()
        run(self._name, self._structure(**given), rows, *tensors)


def dtype_number(dtype: torch.dtype, what: str) -> int:
    """The library's number of a type.

    Raises:
        ValueError: the library has no such type.
    """
    number = DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"{what} has type {dtype}; the CPU kernels take {', '.join(map(str, DTYPES))}")
    return number


_PACK = Operation("pack", "source:any packed:any", longs="n k source_stride", ints="dtype")


def pack_panels(matrices_MNK: torch.Tensor) -> torch.Tensor:
    """Matrices one after another, each in panels of its own (`csrc/micro.h`)."""
    lib, (count, n, k) = library(), matrices_MNK.shape
    panels = -(-n // PANEL)
    size = panels * ((k + 1) // 2) * 2 * PANEL
    packed = lib.allocate(count * size, matrices_MNK.dtype)
    if lib.recorder is not None:
        lib.recorder.refuse("a weight was packed")
    for number, matrix_NK in enumerate(matrices_MNK):
        matrix_NK = matrix_NK if matrix_NK.stride(1) == 1 else matrix_NK.contiguous()
        out = packed[number * size : (number + 1) * size]
        sizes = {"n": n, "k": k, "source_stride": matrix_NK.stride(0)}
        _PACK(panels, source=matrix_NK, packed=out, **sizes, dtype=DTYPES[packed.dtype])
    return packed
