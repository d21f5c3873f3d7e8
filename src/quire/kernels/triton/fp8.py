"""The operations of `kernels/fp8.py` on NVIDIA GPUs from compute capability 8.9: which kernel serves how many rows.

A few rows are multiplied as they are, on the ordinary units, in one launch an operation. More rows are rounded to float8
first (the norm and the activation on the way) and multiplied on the matrix units: by a kernel of ours that is bound by
memory, and from some hundred rows by cuBLAS.

Legend: T rows (tokens), N outputs, K inputs, D hidden, I intermediate.
"""

import functools

import torch

from quire.kernels import ops
from quire.kernels.fp8 import Fp8Scratch, Fp8Weight
from quire.kernels.registry import kernel
from quire.kernels.triton.fp8_rows import Tile, block_of, multiply_rows
from quire.kernels.triton.fp8_vector import MAX_ROWS, multiply_vectors
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.quantize import MAX_BLOCK, quantize_rows

VECTOR_ROWS = 1
"""Up to this many rows go through the ordinary units."""
FEW_ROWS = 64
"""Up to this many rows our matrix kernel is the faster."""
ALIGNMENT = 16
"""cuBLAS takes float8 matrices whose sides are multiples of this."""
MIN_CAPABILITY = (8, 9)


@functools.cache
def unavailable() -> str | None:
    """Why these kernels cannot run here; None where they can."""
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no GPU is visible"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}; float8 matrix units come with 8.9"
    return None


def _cuda(op: str):
    return kernel(op, platform="cuda", priority=10, unavailable=unavailable, invariant=False)


def tile_of(rows: int, weight: Fp8Weight) -> Tile:
    """How our matrix kernel cuts a product."""
    outputs, inputs = weight.out_features, weight.in_features
    block_k = 128 if inputs % 128 == 0 else 64 if inputs % 64 == 0 else 32
    tiles = -(-outputs // 64)
    split = 1
    while tiles * split < 264 and inputs // (block_k * split * 2) >= 4 and split < 16:
        split *= 2
    return Tile(64, block_k, block_of(rows), split, 4, 4)


def _is_for_cublas(x: torch.Tensor, weight: Fp8Weight, rows: int, out_dtype: torch.dtype) -> bool:
    if rows <= FEW_ROWS or x.device.type != "cuda" or out_dtype is not torch.bfloat16:
        return False
    return weight.out_features % ALIGNMENT == 0 and weight.in_features % ALIGNMENT == 0


def _quantized(
    x: torch.Tensor, weight: Fp8Weight, scratch: Fp8Scratch, norm_D: torch.Tensor | None = None, eps: float = 0.0,
    kind: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    quantized_TK, scale_T = scratch.rows(x.shape[0], weight.in_features)
    if weight.in_features > MAX_BLOCK:
        raise ValueError(
            f"a float8 matrix of {weight.in_features} inputs; {MAX_BLOCK} are the most that a row may have"
        )
    quantize_rows(x, quantized_TK, scale_T, norm_D=norm_D, eps=eps, kind=kind, input_scale=weight.input_scale)
    return quantized_TK, scale_T


def _cublas(quantized_TK: torch.Tensor, scale_T: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor) -> None:
    assert weight.data is not None
    bias = None if weight.bias is None else weight.bias.to(out_TN.dtype)
    torch._scaled_mm(
        quantized_TK, weight.data.t(), scale_a=scale_T[:, None], scale_b=weight.scale[None, :], bias=bias,
        out_dtype=out_TN.dtype, use_fast_accum=True, out=out_TN,
    )  # fmt: skip


def _multiply(
    quantized_TK: torch.Tensor, scale_T: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, scratch: Fp8Scratch,
    kind: str = "", add: bool = False,
) -> None:  # fmt: skip
    tile = tile_of(quantized_TK.shape[0], weight)
    multiply_rows(quantized_TK, weight, out, scratch, tile, x_scale_T=scale_T, kind=kind, add=add)


@_cuda("fp8_quantize")
def fp8_quantize(
    x_TK: torch.Tensor, out_TK: torch.Tensor, scale_T: torch.Tensor, input_scale: torch.Tensor | None = None
) -> None:
    quantize_rows(x_TK, out_TK, scale_T, input_scale=input_scale)


def _linear(
    x: torch.Tensor, norm_D: torch.Tensor | None, eps: float, weight: Fp8Weight, out_TN: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:  # fmt: skip
    rows = x.shape[0]
    if rows <= min(VECTOR_ROWS, MAX_ROWS):
        multiply_vectors(x, weight, out_TN, norm_D=norm_D, eps=eps)
        return
    quantized_TK, scale_T = _quantized(x, weight, scratch, norm_D, eps)
    if _is_for_cublas(x, weight, rows, out_TN.dtype):
        _cublas(quantized_TK, scale_T, weight, out_TN)
    else:
        _multiply(quantized_TK, scale_T, weight, out_TN, scratch)


@_cuda("fp8_linear")
def fp8_linear(x_TK: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor, scratch: Fp8Scratch) -> None:
    _linear(x_TK, None, 0.0, weight, out_TN, scratch)


@_cuda("fp8_norm_linear")
def fp8_norm_linear(
    x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: Fp8Weight, out_TN: torch.Tensor, scratch: Fp8Scratch
) -> None:
    _linear(x_TD, norm_D, eps, weight, out_TN, scratch)


@_cuda("fp8_norm_linear_gated")
def fp8_norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: Fp8Weight,
    kind: str,
    out_TI: torch.Tensor,
    wide_T2I: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:
    rows = x_TD.shape[0]
    if rows <= VECTOR_ROWS:
        multiply_vectors(x_TD, weight, out_TI, norm_D=norm_D, eps=eps, kind=kind)
        return
    quantized_TK, scale_T = _quantized(x_TD, weight, scratch, norm_D, eps)
    if _is_for_cublas(x_TD, weight, rows, wide_T2I.dtype):
        _cublas(quantized_TK, scale_T, weight, wide_T2I)
        ops.gated_activation(wide_T2I, kind, out_TI)
    else:
        _multiply(quantized_TK, scale_T, weight, out_TI, scratch, kind=kind)


def _add_quantized(
    quantized_TK: torch.Tensor, scale_T: torch.Tensor, weight: Fp8Weight, residual_TN: torch.Tensor,
    delta_TN: torch.Tensor, scratch: Fp8Scratch,
) -> None:  # fmt: skip
    if _is_for_cublas(quantized_TK, weight, quantized_TK.shape[0], delta_TN.dtype):
        _cublas(quantized_TK, scale_T, weight, delta_TN)
        ops.add(delta_TN, residual_TN)
    else:
        _multiply(quantized_TK, scale_T, weight, residual_TN, scratch, add=True)


@_cuda("fp8_linear_add")
def fp8_linear_add(
    x_TK: torch.Tensor, weight: Fp8Weight, residual_TN: torch.Tensor, delta_TN: torch.Tensor, scratch: Fp8Scratch
) -> None:
    if x_TK.shape[0] <= VECTOR_ROWS:
        multiply_vectors(x_TK, weight, residual_TN, add=True)
        return
    _add_quantized(*_quantized(x_TK, weight, scratch), weight, residual_TN, delta_TN, scratch)


@_cuda("fp8_gated_mlp")
def fp8_gated_mlp(
    residual_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    gate_up: Fp8Weight,
    kind: str,
    down: Fp8Weight,
    wide_T2I: torch.Tensor,
    narrow_TI: torch.Tensor,
    delta_TD: torch.Tensor,
    scratch: Fp8Scratch,
) -> None:
    rows = residual_TD.shape[0]
    if not _is_for_cublas(residual_TD, gate_up, rows, wide_T2I.dtype):
        fp8_norm_linear_gated(residual_TD, norm_D, eps, gate_up, kind, narrow_TI, wide_T2I, scratch)
        fp8_linear_add(narrow_TI, down, residual_TD, delta_TD, scratch)
        return
    _cublas(*_quantized(residual_TD, gate_up, scratch, norm_D, eps), gate_up, wide_T2I)
    _add_quantized(*_quantized(wide_T2I, down, scratch, kind=kind), down, residual_TD, delta_TD, scratch)
