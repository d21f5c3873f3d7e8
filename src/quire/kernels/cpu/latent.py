"""The operations of `kernels/latent.py` on the native library: tensors become pointers, and that is all.

The argument structures are field by field those of `csrc/latent.h`.
"""

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu.arguments import structure
from quire.kernels.cpu.binding import cpu_kernel, pack_panels, run
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import HeadWeight, Rope

_HeadLinear = structure(
    "_HeadLinear", pointers="x packed out", longs="heads n k x_row x_head out_row out_head", ints="dtype"
)
_Latent = structure(
    "_Latent",
    pointers="q latent norm cos_sin slot_mapping positions cache out",
    longs="heads rank rotary_dim q_row q_head out_row out_head page_stride block_size",
    ints="interleaved dtype",
    floats="eps",
)


def _heads(x_TNK: torch.Tensor, name: str) -> tuple[int, int, int]:
    """The address, and the steps from token to token and from head to head."""
    if x_TNK.dtype is not torch.float32 or x_TNK.device.type != "cpu" or x_TNK.stride(2) != 1:
        raise ValueError(
            f"{name} must be a CPU tensor of torch.float32 whose heads are contiguous; it is {x_TNK.dtype} on"
            f" {x_TNK.device} with strides {x_TNK.stride()}"
        )
    return x_TNK.data_ptr(), x_TNK.stride(0), x_TNK.stride(1)


@cpu_kernel("pack_heads")
def pack_heads(weight_NMK: torch.Tensor) -> HeadWeight:
    heads, m, k = weight_NMK.shape
    return HeadWeight(heads, m, k, weight_NMK.dtype, None, pack_panels(weight_NMK))


@cpu_kernel("head_linear")
def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor) -> None:
    packed = weight.packed
    if packed is None:
        raise ValueError("this weight was not packed by the CPU kernels")
    (x, *x_steps), (out, *out_steps) = _heads(x_TNK, "x"), _heads(out_TNM, "out")
    shape = (weight.heads, weight.out_features, weight.in_features)
    call = _HeadLinear(x, packed.data_ptr(), out, *shape, *x_steps, *out_steps, DTYPES[weight.dtype])
    run("head_linear", call, x_TNK.shape[0], x_TNK, packed, out_TNM)


@cpu_kernel("latent_and_cache")
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
    cos_sin = rope.cos_sin
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
    run("latent_and_cache", call, latent_TC.shape[0], *tensors)
