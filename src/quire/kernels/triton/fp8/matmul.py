"""The operations of `kernels/fp8.py` on NVIDIA GPUs from compute capability 8.9: which kernel serves how many rows.

A few rows are multiplied as they are, on the ordinary units, in one launch an operation. More rows are rounded to float8
first (the norm and the activation on the way) and multiplied on the matrix units: by a kernel of ours that is bound by
memory, and from some hundred rows by cuBLAS. Where a row's result must not depend on how many there are, our matrix kernel
multiplies all of them in one way.

Legend: T rows (tokens), N outputs, K inputs, D hidden, I intermediate.
"""

import functools

import torch

from quire.kernels import ops
from quire.kernels.registry import kernel
from quire.kernels.triton.fp8.quantize import MAX_BLOCK, quantize_rows
from quire.kernels.triton.fp8.row_products import Tile, block_of, multiply_rows
from quire.kernels.triton.fp8.scales import apply_scales
from quire.kernels.triton.fp8.vector import multiply_vectors
from quire.kernels.triton.launch import compute_capability, interpreted, is_nvidia, two_ways
from quire.kernels.types import Fp8Scratch, Fp8Weight

VECTOR_ROWS = 1
"""Up to this many rows go through the ordinary units."""
FEW_ROWS = 32
"""Up to this many rows our matrix kernel is the faster."""
ROWWISE_ROWS = 512
"""From this many rows on cuBLAS is as fast with a scale a row as with one in all."""
ALIGNMENT = 16
"""cuBLAS takes float8 matrices whose sides are multiples of this."""
MIN_CAPABILITY = (8, 9)


@functools.cache
def unavailable() -> str | None:
    """Why these kernels cannot run here; None where they can."""
    if interpreted():
        return None
    if not is_nvidia():
        return "written in NVIDIA's assembly (PTX)"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    capability = compute_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}; float8 matrix units come with 8.9"
    return None


def tile_of(rows: int, weight: Fp8Weight) -> Tile:
    """How our matrix kernel cuts a product of some rows: about two or three programs a multiprocessor, all there at once."""
    outputs, inputs = weight.out_features, weight.in_features
    tiles, split = -(-outputs // 64), 1
    block_k = block_k_of(inputs, 256 if rows <= 32 else 128)
    while tiles * split < 250 and inputs // (block_k * split * 2) >= 2 and split < 16:
        split *= 2
    if rows > 32:
        return Tile(64, block_k, block_of(rows), split, 4, 6)
    return Tile(64, block_k, block_of(rows), split, 4, 3 if 264 < tiles * split <= 396 else 4)


def invariant_tile(weight: Fp8Weight) -> Tile:
    """The one cut whatever the number of rows."""
    return Tile(64, block_k_of(weight.in_features, 128), 64, 1, 4, 4)


def block_k_of(inputs: int, most: int) -> int:
    """Inputs of a tile; the units take 32 at once."""
    return next((block for block in (256, 128, 64) if block <= most and inputs % block == 0), 32)


def _is_for_cublas(weight: Fp8Weight, rows: int, out: torch.Tensor) -> bool:
    if rows <= FEW_ROWS or out.device.type != "cuda" or out.dtype is not torch.bfloat16:
        return False
    return weight.out_features % ALIGNMENT == 0 and weight.in_features % ALIGNMENT == 0


def _cublas_unscaled(quantized_TK: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor, scratch: Fp8Scratch) -> None:
    """The product of the float8 numbers alone."""
    assert weight.data is not None
    torch._scaled_mm(
        quantized_TK,
        weight.data.t(),
        scale_a=scratch.one,
        scale_b=scratch.one,
        out_dtype=out_TN.dtype,
        use_fast_accum=True,
        out=out_TN,
    )


def _cublas(quantized_TK: torch.Tensor, scale_T: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor) -> None:
    assert weight.data is not None
    bias = None if weight.bias is None else weight.bias.to(out_TN.dtype)
    torch._scaled_mm(
        quantized_TK,
        weight.data.t(),
        scale_a=scale_T[:, None],
        scale_b=weight.scale[None, :],
        bias=bias,
        out_dtype=out_TN.dtype,
        use_fast_accum=True,
        out=out_TN,
    )


def _quantized(
    x: torch.Tensor,
    weight: Fp8Weight,
    scratch: Fp8Scratch,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
    product: tuple[torch.Tensor, Fp8Weight] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    quantized_TK, scale_T = scratch.rows(x.shape[0], weight.in_features, second=product is not None)
    if weight.in_features > MAX_BLOCK:
        raise ValueError(
            f"a float8 matrix of {weight.in_features} inputs; {MAX_BLOCK} are the most that a row may have"
        )
    quantize_rows(
        x, quantized_TK, scale_T, norm_D=norm_D, eps=eps, kind=kind, input_scale=weight.input_scale, product=product
    )
    return quantized_TK, scale_T


def _multiply(
    quantized_TK: torch.Tensor,
    scale_T: torch.Tensor,
    weight: Fp8Weight,
    out: torch.Tensor,
    scratch: Fp8Scratch,
    is_invariant: bool,
    kind: str = "",
    add: bool = False,
) -> None:
    tile = invariant_tile(weight) if is_invariant else tile_of(quantized_TK.shape[0], weight)
    multiply_rows(quantized_TK, scale_T, weight, out, scratch, tile, kind=kind, add=add)


def _linear(
    x: torch.Tensor,
    norm_D: torch.Tensor | None,
    eps: float,
    weight: Fp8Weight,
    out_TN: torch.Tensor,
    scratch: Fp8Scratch,
    is_invariant: bool,
) -> None:
    rows = x.shape[0]
    if rows <= VECTOR_ROWS and not is_invariant:
        multiply_vectors(x, weight, out_TN, norm_D=norm_D, eps=eps)
        return
    quantized_TK, scale_T = _quantized(x, weight, scratch, norm_D, eps)
    if is_invariant or not _is_for_cublas(weight, rows, out_TN):
        _multiply(quantized_TK, scale_T, weight, out_TN, scratch, is_invariant)
    elif rows < ROWWISE_ROWS:
        _cublas_unscaled(quantized_TK, weight, out_TN, scratch)
        apply_scales(out_TN, scale_T, weight, out_TN)
    else:
        _cublas(quantized_TK, scale_T, weight, out_TN)


@two_ways("fp8_linear", unavailable=unavailable)
def fp8_linear(
    x_TK: torch.Tensor, weight: Fp8Weight, out_TN: torch.Tensor, scratch: Fp8Scratch, *, is_invariant: bool = False
) -> None:
    _linear(x_TK, None, 0.0, weight, out_TN, scratch, is_invariant)


@two_ways("fp8_norm_linear", unavailable=unavailable)
def fp8_norm_linear(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: Fp8Weight,
    out_TN: torch.Tensor,
    scratch: Fp8Scratch,
    *,
    is_invariant: bool = False,
) -> None:
    _linear(x_TD, norm_D, eps, weight, out_TN, scratch, is_invariant)


@two_ways("fp8_norm_linear_gated", unavailable=unavailable)
def fp8_norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: Fp8Weight,
    kind: str,
    out_TI: torch.Tensor,
    wide_T2I: torch.Tensor,
    scratch: Fp8Scratch,
    *,
    is_invariant: bool = False,
) -> None:
    rows = x_TD.shape[0]
    if rows <= VECTOR_ROWS and not is_invariant:
        multiply_vectors(x_TD, weight, out_TI, norm_D=norm_D, eps=eps, kind=kind)
        return
    quantized_TK, scale_T = _quantized(x_TD, weight, scratch, norm_D, eps)
    if not is_invariant and _is_for_cublas(weight, rows, wide_T2I):
        _cublas(quantized_TK, scale_T, weight, wide_T2I)
        ops.gated_activation(wide_T2I, kind, out_TI)
    else:
        _multiply(quantized_TK, scale_T, weight, out_TI, scratch, is_invariant, kind=kind)


@two_ways("fp8_linear_add", unavailable=unavailable)
def fp8_linear_add(
    x_TK: torch.Tensor,
    weight: Fp8Weight,
    residual_TN: torch.Tensor,
    delta_TN: torch.Tensor,
    scratch: Fp8Scratch,
    *,
    is_invariant: bool = False,
) -> None:
    rows = x_TK.shape[0]
    if rows <= VECTOR_ROWS and not is_invariant:
        multiply_vectors(x_TK, weight, residual_TN, add=True)
    else:
        _add_quantized(*_quantized(x_TK, weight, scratch), weight, residual_TN, delta_TN, scratch, is_invariant)


def _add_quantized(
    quantized_TK: torch.Tensor,
    scale_T: torch.Tensor,
    weight: Fp8Weight,
    residual_TN: torch.Tensor,
    delta_TN: torch.Tensor,
    scratch: Fp8Scratch,
    is_invariant: bool,
) -> None:
    rows = quantized_TK.shape[0]
    if is_invariant or not _is_for_cublas(weight, rows, delta_TN):
        _multiply(quantized_TK, scale_T, weight, residual_TN, scratch, is_invariant, add=True)
    elif rows < ROWWISE_ROWS:
        _cublas_unscaled(quantized_TK, weight, delta_TN, scratch)
        apply_scales(delta_TN, scale_T, weight, residual_TN, add=True)
    else:
        _cublas(quantized_TK, scale_T, weight, delta_TN)
        ops.add(delta_TN, residual_TN)


@two_ways("fp8_gated_mlp", unavailable=unavailable)
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
    *,
    is_invariant: bool = False,
) -> None:
    rows = residual_TD.shape[0]
    if not is_invariant and _is_for_cublas(gate_up, rows, wide_T2I):
        quantized_TD, scale_T = _quantized(residual_TD, gate_up, scratch, norm_D, eps)
        product = None
        if rows < ROWWISE_ROWS:
            _cublas_unscaled(quantized_TD, gate_up, wide_T2I, scratch)
            product = (scale_T, gate_up)
        else:
            _cublas(quantized_TD, scale_T, gate_up, wide_T2I)
        quantized = _quantized(wide_T2I, down, scratch, kind=kind, product=product)
        _add_quantized(*quantized, down, residual_TD, delta_TD, scratch, is_invariant)
        return
    fp8_norm_linear_gated(
        residual_TD, norm_D, eps, gate_up, kind, narrow_TI, wide_T2I, scratch, is_invariant=is_invariant
    )
    fp8_linear_add(narrow_TI, down, residual_TD, delta_TD, scratch, is_invariant=is_invariant)


@kernel("fp8_quantize", platform="cuda", priority=5, unavailable=unavailable)
def fp8_quantize(
    x_TK: torch.Tensor, out_TK: torch.Tensor, scale_T: torch.Tensor, input_scale: torch.Tensor | None = None
) -> None:
    quantize_rows(x_TK, out_TK, scale_T, input_scale=input_scale)
