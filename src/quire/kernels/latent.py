"""Operations of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): what stands around attention over
pages of latents.

A token keeps one latent of R values and E rotated ones for all heads. A query head comes as H values for the latent and E
rotated ones; the H are brought to the latent's R by the head's own matrix before attention, and what attention gives (R
values) goes through another one after it. So keys and values themselves are never made.

Legend: T tokens, N query heads, K inputs and M outputs of a head's matrix, P pages, S tokens a page.
"""

import dataclasses

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels import ops
from quire.kernels.ops import Rope


@dataclasses.dataclass
class HeadWeight:
    """A matrix [M, K] a head, as the chosen `head_linear` wants them.

    Attributes:
        data: [N, M, K], or None once a kernel has packed it into its own layout and dropped it.
        packed: the kernel's own layout, or None.
    """

    heads: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    data: torch.Tensor | None
    packed: torch.Tensor | None = None


def pack_heads(weight_NMK: torch.Tensor) -> HeadWeight:
    """Prepare matrices for `head_linear`."""
    return ops.chosen("pack_heads")(weight_NMK)


def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor) -> None:
    """out[t, n] = weight[n] @ x[t, n]; accumulates in float32. Rows and heads of x and out may lie apart, a head's values
    not."""
    ops.chosen("head_linear")(x_TNK, weight, out_TNM)


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
    """out = the heads' E rotated at their tokens' positions, and each token's latent, RMS-normed, with its own E behind it,
    rotated, written to the token's slot, divided by `scale` where pages are fp8. Slots below 0 are skipped.

    Args:
        q_TNE, out_TNE: tokens and heads may lie apart.
        latent_TC: R + E columns; not normed yet, not rotated.
        norm_R: float32.
        kv_cache: [2, P, 1, S, R + E], of which the first plane is written.
    """
    ops.chosen("latent_and_cache")(q_TNE, latent_TC, norm_R, eps, rope, kv_cache, metadata, out_TNE, scale)
