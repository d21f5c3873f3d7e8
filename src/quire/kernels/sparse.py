"""Operations of sparse attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556): small index keys beside the pages of
latents, the choice of tokens by them, and attention to the chosen tokens alone.

Legend: T tokens, N heads of the index, I values of an index head, P pages, S tokens a page, K tokens that are chosen, H heads of
attention, R values of a latent, C values of a page's latent with its rotated part.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels import ops
from quire.kernels.ops import Rope


def index_and_cache(
    q_TNI: torch.Tensor,
    k_TI: torch.Tensor,
    rope: Rope,
    first: int,
    pages_PSI: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Rotate the values from `first` on of index queries, in place, and of index keys, which are written to their tokens' slots.
    Slots below 0 are skipped."""
    ops.chosen("index_and_cache")(q_TNI, k_TI, rope, first, pages_PSI, metadata)


def choose_tokens(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    pages_PSI: torch.Tensor,
    metadata: AttentionMetadata,
    top_k: int,
) -> torch.Tensor:
    """For each token the positions [T, K] (int32) of the `top_k` of its context with the largest sum over heads of
    weight * relu(q . k), itself included; -1 where there are fewer. K is at most `top_k`."""
    return ops.chosen("choose_tokens")(q_TNI, weights_TN, pages_PSI, metadata, top_k)


def chosen_attention(
    q_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    chosen_TK: torch.Tensor,
    out_TC: torch.Tensor,
) -> None:
    """As `paged_attention` over latents, where each token sees the chosen positions alone.

    Args:
        q_TC: H * C columns, of which H * R come out.
    """
    ops.chosen("chosen_attention")(q_TC, kv_cache, metadata, params, chosen_TK, out_TC)
