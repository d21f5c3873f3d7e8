"""The operations of `kernels/latent.py` on the native library: tensors become pointers, and that is all.

The argument structures are field by field those of `csrc/latent.h`.
"""

from typing import Any

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu.binding import Operation, cpu_kernel, pack_panels
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import HeadWeight, Rope

_HEAD_LINEAR = Operation(
    "head_linear", "x:any packed:any out:any", longs="heads n k x_row x_head out_row out_head", ints="dtype"
)
_LATENT = Operation(
    "latent_and_cache",
    "q:any latent norm cos_sin slot_mapping:long positions:int cache:any out:any",
    longs="heads rank rotary_dim q_row q_head out_row out_head page_stride block_size",
    ints="interleaved dtype",
    floats="eps",
)


def _heads(x_TNK: torch.Tensor, name: str) -> dict[str, Any]:
    """The arguments that tell of a tensor: itself, and the steps from token to token and from head to head."""
    if x_TNK.dtype is not torch.float32 or x_TNK.device.type != "cpu" or x_TNK.stride(2) != 1:
        raise ValueError(
            f"{name} must be a CPU tensor of torch.float32 whose heads are contiguous; it is {x_TNK.dtype} on"
            f" {x_TNK.device} with strides {x_TNK.stride()}"
        )
    return {name: x_TNK, f"{name}_row": x_TNK.stride(0), f"{name}_head": x_TNK.stride(1)}


@cpu_kernel("pack_heads")
def pack_heads(weight_NMK: torch.Tensor) -> HeadWeight:
    heads, m, k = weight_NMK.shape
    return HeadWeight(heads, m, k, weight_NMK.dtype, None, pack_panels(weight_NMK))


@cpu_kernel("head_linear")
def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor) -> None:
    packed = weight.packed
    if packed is None:
        raise ValueError("this weight was not packed by the CPU kernels")
    shape = {"heads": weight.heads, "n": weight.out_features, "k": weight.in_features}
    ends = _heads(x_TNK, "x") | _heads(out_TNM, "out")
    _HEAD_LINEAR(len(x_TNK), packed=packed, **ends, **shape, dtype=DTYPES[weight.dtype])


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
    _LATENT(
        len(latent_TC),
        **_heads(q_TNE, "q"),
        **_heads(out_TNE, "out"),
        latent=latent_TC,
        norm=norm_R,
        cos_sin=rope.cos_sin,
        slot_mapping=metadata.slot_mapping,
        positions=metadata.positions,
        cache=kv_cache,
        heads=q_TNE.shape[1],
        rank=len(norm_R),
        rotary_dim=rope.rotary_dim,
        page_stride=kv_cache.stride(1),
        block_size=metadata.block_size,
        interleaved=rope.interleaved,
        dtype=DTYPES[kv_cache.dtype],
        eps=eps,
    )
