"""Operations of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): what stands around attention over
pages of latents.

A token keeps one latent of R values and E rotated ones for all heads. A query head comes as H values for the latent and E
rotated ones; the H are brought to the latent's R by the head's own matrix before attention, and what attention gives (R
values) goes through another one after it. So keys and values themselves are never made.

Legend: T tokens, N query heads, K inputs and M outputs of a head's matrix, P pages, S tokens a page.
"""

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata
from quire.kernels.attention import kept_slots, rotate, to_cache
from quire.kernels.norm import rms
from quire.kernels.registry import operation
from quire.kernels.types import HeadWeight, Rope


@operation
def pack_heads(weight_NMK: Tensor) -> HeadWeight:
    """Prepare matrices for `head_linear`."""
    heads, outputs, inputs = weight_NMK.shape
    return HeadWeight(heads, outputs, inputs, weight_NMK.dtype, weight_NMK.contiguous())


@operation
def head_linear(x_TNK: Tensor, weight: HeadWeight, out_TNM: Tensor) -> None:
    """out[t, n] = weight[n] @ x[t, n]; accumulates in float32. Rows and heads of x and out may lie apart, a head's values
    not."""
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel")
    out_TNM.copy_(torch.einsum("tnk,nmk->tnm", x_TNK.float(), weight.data.float()))


@operation
def latent_and_cache(
    q_TNE: Tensor,
    latent_TC: Tensor,
    norm_R: Tensor,
    eps: float,
    rope: Rope,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    out_TNE: Tensor,
    scale: float = 1.0,
) -> None:
    """out = the heads' E rotated at their tokens' positions, and each token's latent, RMS-normed, with its own E behind it,
    rotated, written to the token's slot, divided by `scale` where pages are fp8. Slots below 0 are skipped.

    Args:
        q_TNE, out_TNE: tokens and heads may lie apart.
        latent_TC: R + E columns; not normed yet, not rotated.
        norm_R: float32.
        kv_cache: [2, P, 1, S, R + E], of which the first plane is written.
    """
    tokens, rank = latent_TC.shape[0], norm_R.shape[0]
    cos_sin = rope.cos_sin[metadata.positions[:tokens].long()]
    out_TNE.copy_(rotate(q_TNE.float(), cos_sin, rope))
    latent_TR, key_TE = latent_TC.float().split((rank, rope.rotary_dim), dim=1)
    kept_TC = torch.cat((rms(latent_TR, norm_R, eps), rotate(key_TE[:, None], cos_sin, rope)[:, 0]), dim=1)
    written, pages, offsets = kept_slots(metadata, tokens)
    kv_cache[0, pages, 0, offsets] = to_cache(kept_TC[written], scale, kv_cache.dtype)
