"""The operations of `kernels/packed.py` on NVIDIA GPUs: which kernel serves how many rows.

Most codes are laid out in tiles for the tensor cores (`packed_tiles.py`), which take any number of rows. Tables with zeros,
fractional zeros and float32 models stay as they are stored: up to four rows are multiplied on the ordinary units, more on the
tensor cores. Scales become float16 where that holds them exactly. What no kernel takes (groups that are no multiples of 16
columns) is multiplied by the reference.
"""

import dataclasses

import torch

from quire.kernels import ops, packed
from quire.kernels.registry import kernel, reference
from quire.kernels.triton.launch import next_power_of_2, two_ways
from quire.kernels.triton.linear.dot import split_workspace
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.triton.packed.dot import block_k_of, launch_packed_dot
from quire.kernels.triton.packed.gemv import launch_packed_gemv, max_rows
from quire.kernels.triton.packed.int8 import launch_int8
from quire.kernels.triton.packed.layout import Tiles, layout_of, scale_sizes, tiled
from quire.kernels.triton.packed.tiles import launch_bands, launch_tiles, reserve_band
from quire.kernels.types import Int8Weight, PackedWeight

MAX_BLOCK_T, INVARIANT_BLOCK_T = 128, 64
BAND_ROWS = 512
"""From so many rows on it pays to make bands of a matrix whole: 256 rows of a Llama-3.1-8B layer take 260 µs in tiles for 377,
512 take 460 for 477, 1,024 take 885 for 743 (H200)."""


def _narrow(values: torch.Tensor) -> torch.Tensor:
    half = values.half()
    return half if torch.equal(half.float(), values) else values.contiguous()


@kernel("pack_codes", platform="cuda", priority=10)
def pack_codes(weight: PackedWeight) -> PackedWeight:
    """As `packed.pack_codes`."""
    codes, scale_NG = weight.plain()
    split_workspace(codes.device)
    if (layout := layout_of(weight)) is not None:
        reserve_band(codes.device, weight.dtype)
        return tiled(weight, layout, min(scale_sizes(weight, layout)))
    zero = None if weight.zero is None else _narrow(weight.zero)
    return dataclasses.replace(weight, data=codes.contiguous(), scale=_narrow(scale_NG), zero=zero)


def _fits(weight: PackedWeight) -> bool:
    """Whether a thread's columns are whole loads of one group."""
    _, scale_NG = weight.plain()
    group = weight.in_features // scale_NG.shape[1]
    return group % 16 == 0 and block_k_of(group, weight.in_features) > 0


def _require_rows(x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
    if not (x_TK.is_contiguous() and out_TN.is_contiguous()):
        raise ValueError(f"rows must lie together; strides are {x_TK.stride()} and {out_TN.stride()}")


def _multiply(
    x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor, is_invariant: bool, add: bool = False
) -> None:
    _require_rows(x_TK, out_TN)
    rows = x_TK.shape[0]
    if not rows:
        return
    if isinstance(weight.layout, Tiles):
        x_TK = x_TK.to(weight.dtype)
        config = None if is_invariant else packed_vector.choose(weight, rows)
        if config is not None:
            packed_vector.launch_vector(x_TK, weight, out_TN, config, add=add)
        elif rows >= BAND_ROWS and not is_invariant and out_TN.dtype == weight.dtype:
            launch_bands(x_TK, weight, out_TN, add=add)
        else:
            launch_tiles(x_TK, weight, out_TN, is_invariant=is_invariant, add=add)
    elif add:
        product_TN = torch.empty_like(out_TN)
        _multiply(x_TK, weight, product_TN, is_invariant)
        out_TN += product_TN
    elif not _fits(weight):
        reference(packed.packed_linear)(x_TK, weight, out_TN)
    elif is_invariant:
        launch_packed_dot(x_TK, weight, out_TN, block_t=INVARIANT_BLOCK_T, may_split=False)
    elif rows <= max_rows(weight):
        launch_packed_gemv(x_TK, weight, out_TN)
    else:
        block_t = min(max(next_power_of_2(rows), 16), MAX_BLOCK_T)
        launch_packed_dot(x_TK, weight, out_TN, block_t=block_t, may_split=True)


@two_ways("packed_linear")
def packed_linear(
    x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor, *, is_invariant: bool = False
) -> None:
    """As `packed.packed_linear`; inputs and values may be rounded to the model's type before they are multiplied."""
    _multiply(x_TK, weight, out_TN, is_invariant)


@two_ways("packed_linear_add")
def packed_linear_add(
    x_TK: torch.Tensor, weight: PackedWeight, residual_TN: torch.Tensor, *, is_invariant: bool = False
) -> None:
    """As `packed.packed_linear_add`."""
    _multiply(x_TK, weight, residual_TN, is_invariant, add=True)


@kernel("packed_norm_linear_gated", platform="cuda", priority=10, invariant=False)
def packed_norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    kind: str,
    out_TI: torch.Tensor,
    scratch_TD: torch.Tensor,
    scratch_T2I: torch.Tensor,
) -> None:
    """As `packed.packed_norm_linear_gated`."""
    ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
    if (config := packed_vector.choose(weight, x_TD.shape[0])) is not None:
        _require_rows(scratch_TD, out_TI)
        packed_vector.launch_vector(scratch_TD.to(weight.dtype), weight, out_TI, config, kind=kind)
    else:
        packed_linear(scratch_TD, weight, scratch_T2I)
        ops.gated_activation(scratch_T2I, kind, out_TI)


@kernel("pack_int8", platform="cuda", priority=10)
def pack_int8(weight: Int8Weight) -> Int8Weight:
    """As `packed.pack_int8`."""
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel: choose `pack_int8` and `int8_linear` together")
    return dataclasses.replace(weight, data=weight.data.contiguous(), scale=weight.scale.float().contiguous())


@kernel("int8_linear", platform="cuda", priority=10)
def int8_linear(x_TK: torch.Tensor, weight: Int8Weight, out_TN: torch.Tensor) -> None:
    """As `packed.int8_linear`."""
    _require_rows(x_TK, out_TN)
    if x_TK.shape[0]:
        launch_int8(x_TK, weight, out_TN)
