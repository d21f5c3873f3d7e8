"""Operations of sparse attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556): small index keys beside the pages of
latents, the choice of tokens by them, and attention to the chosen tokens alone.

Legend: T tokens, N heads of the index, I values of an index head, P pages, S tokens a page, K tokens that are chosen, H heads of
attention, R values of a latent, C values of a page's latent with its rotated part.
"""

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.attention import kept_slots, rotate, to_cache
from quire.kernels.registry import operation
from quire.kernels.types import Rope

MOST_VALUES = 1 << 25
"""Of a temporary tensor: a part of the step's tokens is computed at a time."""


def rows_of_tokens(metadata: AttentionMetadata, tokens: int) -> Tensor:
    """Each token's row in the block table."""
    starts, count = metadata.query_start, metadata.num_requests
    token_T = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    request_T = torch.searchsorted(starts[1 : count + 1], token_T, right=True).clamp_(max=max(count - 1, 0))
    return metadata.rows[request_T].long()


@operation
def index_and_cache(
    q_TNI: Tensor,
    k_TI: Tensor,
    rope: Rope,
    first: int,
    pages_PSI: Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Rotate the values from `first` on of index queries, in place, and of index keys, which are written to their tokens' slots.
    Slots below 0 are skipped."""
    tokens, last = q_TNI.shape[0], first + rope.rotary_dim
    cos_sin = rope.cos_sin[metadata.positions[:tokens].long()]
    q_TNI[..., first:last] = rotate(q_TNI[..., first:last].float(), cos_sin, rope).to(q_TNI.dtype)
    keys_TI = k_TI.float().clone()
    keys_TI[:, first:last] = rotate(keys_TI[:, None, first:last], cos_sin, rope)[:, 0]
    kept, pages, offsets = kept_slots(metadata, tokens)
    pages_PSI[pages, offsets] = to_cache(keys_TI[kept], 1.0, pages_PSI.dtype)


@operation
def choose_tokens(
    q_TNI: Tensor,
    weights_TN: Tensor,
    pages_PSI: Tensor,
    metadata: AttentionMetadata,
    top_k: int,
) -> Tensor:
    """For each token the positions [T, K] (int32) of the `top_k` of its context with the largest sum over heads of
    weight * relu(q . k), itself included; -1 where there are fewer. K is at most `top_k`."""
    tokens, heads, size = q_TNI.shape
    count = metadata.num_requests
    starts, lengths, rows = (
        values[:many].tolist()
        for values, many in ((metadata.query_start, count + 1), (metadata.seq_lens, count), (metadata.rows, count))
    )
    most = min(top_k, max(lengths, default=0))
    chosen_TK = torch.full((tokens, most), -1, dtype=torch.int32, device=q_TNI.device)
    for b in range(count):
        start, end, length = starts[b], starts[b + 1], lengths[b]
        if start == end:
            continue
        pages = metadata.block_table[rows[b], : -(-length // metadata.block_size)].long()
        keys_LI = pages_PSI[pages].reshape(-1, size)[:length].float()
        k_position = torch.arange(length, device=q_TNI.device)
        part = max(MOST_VALUES // (heads * length), 1)
        for first in range(start, end, part):
            some = slice(first, min(first + part, end))
            scores_QNL = torch.einsum("qni,li->qnl", q_TNI[some].float(), keys_LI).relu_()
            scores_QL = torch.einsum("qn,qnl->ql", weights_TN[some].float(), scores_QNL)
            q_position = metadata.positions[some, None]
            scores_QL.masked_fill_(k_position > q_position, float("-inf"))
            best_QK = scores_QL.topk(min(top_k, length), dim=-1).indices
            chosen_TK[some, : best_QK.shape[1]] = best_QK.masked_fill(best_QK > q_position, -1).int()
    return chosen_TK


@operation
def chosen_attention(
    q_TC: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    chosen_TK: Tensor,
    out_TC: Tensor,
) -> None:
    """As `paged_attention` over latents, where each token sees the chosen positions alone.

    Args:
        q_TC: H * C columns, of which H * R come out.
    """
    tokens, size, heads = q_TC.shape[0], metadata.block_size, params.num_heads
    row_T = rows_of_tokens(metadata, tokens)
    scale = params.k_scale if kv_cache.dtype == torch.float8_e4m3fn else 1.0
    part = max(MOST_VALUES // max(chosen_TK.shape[1] * params.head_dim, 1), 1)
    for first in range(0, tokens, part):
        some = slice(first, min(first + part, tokens))
        position_QK = chosen_TK[some].long()
        hidden_QK, position_QK = position_QK < 0, position_QK.clamp(min=0)
        page_QK = metadata.block_table[row_T[some, None], position_QK // size].long()
        keys_QKC = kv_cache[0, page_QK, 0, position_QK % size].float() * scale
        # A hidden position may hold anything: its weight is zero, but zero times infinity is not.
        keys_QKC.masked_fill_(hidden_QK[..., None], 0.0)
        q_QHC = q_TC[some, : heads * params.head_dim].reshape(-1, heads, params.head_dim).float()
        scores_QHK = torch.einsum("qhc,qkc->qhk", q_QHC, keys_QKC) * params.scale
        scores_QHK.masked_fill_(hidden_QK[:, None], float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks.float()[None, :, None].expand(len(q_QHC), -1, 1)
            weights_QHK = torch.softmax(torch.cat((scores_QHK, sinks), dim=-1), dim=-1)[..., :-1]
        else:
            weights_QHK = torch.softmax(scores_QHK, dim=-1)
        attended = torch.einsum("qhk,qkr->qhr", weights_QHK, keys_QKC[..., : params.value_dim])
        out_TC[some].copy_(attended.flatten(1))
