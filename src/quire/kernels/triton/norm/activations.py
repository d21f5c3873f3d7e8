"""Activations, their gated form, sums of rows, and what is done to logits: one value at a time, at the memory's speed.

Arithmetic is float32; each value depends on its own inputs alone.
"""

from typing import Any

import torch
import triton

from quire.kernels.norm import ACTIVATIONS
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl

KINDS = tuple(ACTIVATIONS)
"""Kernels know an activation by its place here."""
BLOCK = 1024
"""Values a program handles: eight a thread, which is one vector of 16 bit types. Larger blocks gain nothing (H200)."""
WARPS = 4


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Accurate to a few units in the last place also near zero, where the quotient would cancel."""
    size = tl.abs(x)
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of float32 values; KIND is an index into KINDS."""
    if KIND == 0:
        y = x * _sigmoid(x)
    elif KIND == 1 or KIND == 6:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        if KIND == 6:
            y = tl.minimum(y, 10.0)
    elif KIND == 2:
        # x / 2 * (1 + tanh(z)) is x * sigmoid(2 z). A cube beyond the range is infinite, which the sigmoid takes.
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 5:
        y = x * _sigmoid(1.702 * x)
    elif KIND == 8:
        y = tl.maximum(x, 0.01 * x)
    elif KIND == 9:
        y = _sigmoid(x)
    elif KIND == 10:
        y = _tanh(x)
    elif KIND == 11:
        # tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2), which is 1 long before e is infinite.
        e = tl.exp(tl.minimum(x, 20.0))
        n = e * (e + 2.0)
        y = x * (n / (n + 2.0))
    elif KIND == 12:
        y = x * (tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0)
    elif KIND == 13:
        y = x
    elif KIND == 14:
        y = 0.5 * (1.0 + tl.erf((x - 0.707107) * 2.5066264))  # its mean, and 1 / (0.282095 * sqrt(2))
    elif KIND == 15:
        e = tl.exp(-tl.abs(x))  # small ones by the series: the logarithm of a sum with 1 would lose them
        log1p = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.33333333)), tl.log(1.0 + e))
        y = tl.sqrt(tl.maximum(x, 0.0) + log1p)
    else:
        y = tl.maximum(x, 0.0)
        if KIND == 4:
            y = y * y
        elif KIND == 7:
            y = tl.minimum(y, 6.0)
    return y


@triton.jit
def gated_activation_kernel(
    x_ptr, out_ptr, width, x_stride, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, (activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_kernel(x_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, activate(x, KIND).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_kernel(x_ptr, out_ptr, size, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (out + x * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_and_cap_kernel(x_ptr, size, scale, soft_cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        x = _tanh(x / soft_cap) * soft_cap
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)


def _kind_number(kind: str) -> int:
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(KINDS)}")
    return KINDS.index(kind)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {tuple(tensor.stride())}")


def _launch_flat(kernel_function: Any, tensors: tuple[torch.Tensor, ...], *arguments: Any, **constants: Any) -> None:
    """One program for each block of the tensors' values."""
    size = tensors[0].numel()
    if not size:
        return
    kernel_function[(cdiv(size, BLOCK),)](
        *tensors, size, *arguments, **constants, BLOCK=BLOCK, num_warps=WARPS, **launch_options()
    )


@kernel("gated_activation", platform="cuda", priority=10)
def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    """As `ops.gated_activation`; rows may lie apart."""
    rows, width = out_TI.shape
    if not rows:
        return
    gated_activation_kernel[(cdiv(width, BLOCK) * rows,)](
        x_T2I,
        out_TI,
        width,
        x_T2I.stride(0),
        out_TI.stride(0),
        KIND=_kind_number(kind),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **launch_options(),
    )


@kernel("activation", platform="cuda", priority=10)
def activation(x_TI: torch.Tensor, kind: str) -> None:
    """As `ops.activation`."""
    _check_contiguous("x", x_TI)
    _launch_flat(activation_kernel, (x_TI,), KIND=_kind_number(kind))


@kernel("add", platform="cuda", priority=10)
def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    """As `ops.add`."""
    _check_contiguous("x", x_TD)
    _check_contiguous("out", out_TD)
    _launch_flat(add_kernel, (x_TD, out_TD), float(scale))


@kernel("scale_and_cap", platform="cuda", priority=10)
def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    """As `ops.scale_and_cap`."""
    _check_contiguous("x", x_TV)
    if scale != 1.0 or soft_cap > 0:
        _launch_flat(scale_and_cap_kernel, (x_TV,), float(scale), float(soft_cap), HAS_CAP=soft_cap > 0)


@triton.jit
def sigmoid_gate_kernel(
    x_ptr, gate_ptr, width, gate_stride, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One row a program."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, inside = x_ptr + row * width + column, column < width
    if EACH:
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside)
    else:
        gate = tl.load(gate_ptr + row * gate_stride)
    share = 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(at, (tl.load(at, mask=inside).to(tl.float32) * share).to(x_ptr.dtype.element_ty), mask=inside)


@kernel("sigmoid_gate", platform="cuda", priority=10)
def sigmoid_gate(x_TI: torch.Tensor, gate_TG: torch.Tensor) -> None:
    """As `ops.sigmoid_gate`."""
    rows, width = x_TI.shape
    if rows:
        block, is_each = next_power_of_2(width), gate_TG.shape[1] > 1
        sigmoid_gate_kernel[(rows,)](
            x_TI,
            gate_TG,
            width,
            gate_TG.stride(0),
            EACH=is_each,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(),
        )
