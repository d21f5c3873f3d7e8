"""The operations of `kernels/latent.py` on the native library: tensors become pointers, and that is all.

The argument structures are field by field those of `csrc/latent.h`.
"""

import ctypes

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.library import DTYPES, library
from quire.kernels.cpu.operations import PANEL, PRIORITY, unavailable
from quire.kernels.latent import HeadWeight
from quire.kernels.ops import Rope
from quire.kernels.registry import kernel


class _HeadLinear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "packed", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "n", "k", "x_row", "x_head", "out_row", "out_head")),
        ("dtype", ctypes.c_int32),
    ]


class _Latent(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "latent", "norm", "cos_sin", "slot_mapping", "positions")),
        *((name, ctypes.c_void_p) for name in ("cache", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rank", "rotary_dim", "q_row", "q_head", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("page_stride", "block_size")),
        *((name, ctypes.c_int32) for name in ("interleaved", "dtype")),
        ("eps", ctypes.c_float),
    ]


def _cpu(op: str):
    return kernel(op, platform="cpu", priority=PRIORITY, unavailable=unavailable)


def _heads(x_TNK: torch.Tensor, name: str) -> tuple[int, int, int]:
    """The address, and the steps from token to token and from head to head."""
    if x_TNK.dtype is not torch.float32 or x_TNK.device.type != "cpu" or x_TNK.stride(2) != 1:
        raise ValueError(
            f"{name} must be a CPU tensor of torch.float32 whose heads are contiguous; it is {x_TNK.dtype} on"
            f" {x_TNK.device} with strides {x_TNK.stride()}"
        )
    return x_TNK.data_ptr(), x_TNK.stride(0), x_TNK.stride(1)


@_cpu("pack_heads")
def pack_heads(weight_NMK: torch.Tensor) -> HeadWeight:
    weight_NMK, lib = weight_NMK.contiguous(), library()
    heads, m, k = weight_NMK.shape
    panels, pairs, dtype = (m + PANEL - 1) // PANEL, (k + 1) // 2, weight_NMK.dtype
    packed = lib.allocate(heads * panels * pairs * 2 * PANEL, dtype)
    for weight_MK, part in zip(weight_NMK, packed.view(heads, -1), strict=True):
        packing = native.PackArguments(weight_MK.data_ptr(), part.data_ptr(), m, k, k, DTYPES[dtype])
        lib.run(lib.operation("pack"), packing, panels, (weight_MK, packed))
    return HeadWeight(heads, m, k, dtype, None, packed)


@_cpu("head_linear")
def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor) -> None:
    lib, packed = library(), weight.packed
    if packed is None:
        raise ValueError("this weight was not packed by the CPU kernels")
    (x, *x_steps), (out, *out_steps) = _heads(x_TNK, "x"), _heads(out_TNM, "out")
    shape = (weight.heads, weight.out_features, weight.in_features)
    call = _HeadLinear(x, packed.data_ptr(), out, *shape, *x_steps, *out_steps, DTYPES[weight.dtype])
    lib.run(lib.operation("head_linear"), call, x_TNK.shape[0], (x_TNK, packed, out_TNM))


@_cpu("latent_and_cache")
def latent_and_cache(
    q_TNE: torch.Tensor,
    latent_TC: torch.Tensor,
    norm_R: torch.Tensor,
    eps: float,
    rope: Rope,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNE: torch.Tensor,
    scale: float = 1.0,
) -> None:
    if not latent_TC.is_contiguous() or not kv_cache[0, 0].is_contiguous():
        raise ValueError("latents and their pages must be contiguous")
    lib, cos_sin = library(), rope.cos_sin
    (q, *q_steps), (out, *out_steps) = _heads(q_TNE, "q"), _heads(out_TNE, "out")
    call = _Latent(
        q,
        latent_TC.data_ptr(),
        norm_R.data_ptr(),
        cos_sin.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        metadata.positions.data_ptr(),
        kv_cache.data_ptr(),
        out,
        q_TNE.shape[1],
        norm_R.shape[0],
        rope.rotary_dim,
        *q_steps,
        *out_steps,
        kv_cache.stride(1),
        metadata.block_size,
        int(rope.interleaved),
        DTYPES[kv_cache.dtype],
        eps,
    )
    tensors = (q_TNE, latent_TC, norm_R, cos_sin, kv_cache, metadata.slot_mapping, metadata.positions, out_TNE)
    lib.run(lib.operation("latent_and_cache"), call, latent_TC.shape[0], tensors)
