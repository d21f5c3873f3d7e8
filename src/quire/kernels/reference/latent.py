"""Multi-head latent attention's own operations in plain PyTorch."""

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.latent import HeadWeight
from quire.kernels.ops import Rope
from quire.kernels.reference.attention import rotate, to_cache
from quire.kernels.registry import kernel


@kernel("pack_heads", platform="any")
def pack_heads(weight_NMK: torch.Tensor) -> HeadWeight:
    heads, outputs, inputs = weight_NMK.shape
    return HeadWeight(heads, outputs, inputs, weight_NMK.dtype, weight_NMK.contiguous())


@kernel("head_linear", platform="any")
def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor) -> None:
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel")
    out_TNM.copy_(torch.einsum("tnk,nmk->tnm", x_TNK.float(), weight.data.float()))


@kernel("latent_and_cache", platform="any")
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
    tokens, rank = latent_TC.shape[0], norm_R.shape[0]
    cos_sin = rope.cos_sin[metadata.positions[:tokens].long()]
    out_TNE.copy_(rotate(q_TNE.float(), cos_sin, rope))
    latent_TR, key_TE = latent_TC.float().split((rank, rope.rotary_dim), dim=1)
    latent_TR = latent_TR * torch.rsqrt(latent_TR.square().mean(-1, keepdim=True) + eps) * norm_R.float()
    kept_TC = torch.cat((latent_TR, rotate(key_TE[:, None], cos_sin, rope)[:, 0]), dim=1)
    slots = metadata.slot_mapping[:tokens]
    written = slots >= 0
    pages, offsets = slots[written] // metadata.block_size, slots[written] % metadata.block_size
    kv_cache[0, pages, 0, offsets] = to_cache(kept_TC[written], scale, kv_cache.dtype)
