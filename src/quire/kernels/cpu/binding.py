"""How an operation is bound to the native library: which kernel it is, where its tensors lie, and that it runs.

Knows pointers and panels; knows nothing of what an operation computes.
Legend: M matrices, N outputs, K inputs.
"""

import ctypes

import torch

from quire.kernels.cpu.arguments import PackArguments
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


def address(tensor: torch.Tensor | None, dtype: torch.dtype, name: str) -> int | None:
    """The address of a contiguous tensor; None of None.

    Raises:
        ValueError: another type or device, or gaps.
    """
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a contiguous CPU tensor of {dtype}; it is {tensor.dtype} on {tensor.device}"
            f" with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def float_address(tensor: torch.Tensor | None, name: str) -> int | None:
    """`address` of float32 values."""
    return address(tensor, torch.float32, name)


def rows_address(tensor: torch.Tensor, name: str) -> int:
    """The address of float32 rows, which may lie apart.

    Raises:
        ValueError: another type or device, or gaps within a row.
    """
    if tensor.dtype is not torch.float32 or tensor.stride(1) != 1 or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be float32 rows on the CPU; it is {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def dtype_number(dtype: torch.dtype, what: str) -> int:
    """The library's number of a type.

    Raises:
        ValueError: the library has no such type.
    """
    number = DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"{what} has type {dtype}; the CPU kernels take {', '.join(map(str, DTYPES))}")
    return number


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
        out = packed.data_ptr() + number * size * packed.element_size()
        call = PackArguments(matrix_NK.data_ptr(), out, n, k, matrix_NK.stride(0), DTYPES[packed.dtype])
        run("pack", call, panels, matrix_NK, packed)
    return packed
