"""Attention whose scores grow by a learned number for each distance: of each head (T5), or mixed for every query of a few
profiles (Inkling).

Keys and values lie in pages [2, P, 1, S, K * H]: keys of all heads, then values.
Legend: T tokens, Q tokens of a part, L tokens of a context, N heads, K KV heads, G heads that share one, H head size, R profiles,
E distances, P pages, S tokens a page.
"""

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.registry import operation
from quire.kernels.sparse import MOST_VALUES


@operation
def relative_attention(
    q_TNH: Tensor,
    mix_TNR: Tensor | None,
    profiles_ER: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: Tensor,
) -> None:
    """Attention to the tokens before each (within the window, if there is one), or to all if not causal, with scores
    q . k * scale + bias, where bias is the sum over profiles of mix * profile at the distance of query and key; without a mix
    each head has a profile. Distances beyond the table count as its last; if not causal, its middle is the distance 0."""
    count, size = metadata.num_requests, metadata.block_size
    starts, lengths, rows = (
        values[:many].tolist()
        for values, many in ((metadata.query_start, count + 1), (metadata.seq_lens, count), (metadata.rows, count))
    )
    heads, extent = q_TNH.shape[1], len(profiles_ER)
    for b in range(count):
        start, end, length = starts[b], starts[b + 1], lengths[b]
        before = length - (end - start)
        part = max(MOST_VALUES // (heads * max(length, extent)), 1)
        for first in range(start, end, part):
            last = min(first + part, end)
            last_position = before + last - start if params.causal else length
            oldest = max(before + first - start - params.window + 1, 0) if params.window else 0
            pages = metadata.block_table[rows[b], oldest // size : -(-last_position // size)].long()
            skipped = oldest // size * size
            keys, values = (
                plane[pages, 0].flatten(0, 1)[oldest - skipped : last_position - skipped].float() for plane in kv_cache
            )
            some = slice(first, last)
            scores_QNL = _scores(q_TNH[some].float(), keys, params)
            q_position = torch.arange(before + first - start, before + last - start, device=keys.device)
            distance_QL = q_position[:, None] - torch.arange(oldest, last_position, device=keys.device)
            mix_QNR, nearest = None if mix_TNR is None else mix_TNR[some].float(), 0 if params.causal else extent // 2
            scores_QNL += _biases(mix_QNR, profiles_ER.float(), (distance_QL + nearest).clamp(0, extent - 1))
            if params.causal:
                scores_QNL.masked_fill_((distance_QL < 0)[:, None], float("-inf"))
            if params.window:
                scores_QNL.masked_fill_((distance_QL >= params.window)[:, None], float("-inf"))
            out_TNH[some].copy_(_weighted(scores_QNL.softmax(dim=-1), values, params))


def _scores(q_QNH: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
    keys_LKH = keys.unflatten(1, (params.num_kv_heads, -1))
    q_QKGH = q_QNH.unflatten(1, (params.num_kv_heads, -1))
    return torch.einsum("qkgh,lkh->qkgl", q_QKGH, keys_LKH).flatten(1, 2) * params.scale


def _weighted(weights_QNL: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    values_LKH = values.unflatten(1, (params.num_kv_heads, -1))
    grouped_QKGL = weights_QNL.unflatten(1, (params.num_kv_heads, -1))
    return torch.einsum("qkgl,lkh->qkgh", grouped_QKGL, values_LKH).flatten(1, 2)


def _biases(mix_QNR: Tensor | None, profiles_ER: Tensor, at_QL: Tensor) -> Tensor:
    """[Q, N, L]: what each head's scores grow by."""
    if mix_QNR is None:
        return profiles_ER[at_QL].transpose(1, 2)
    by_distance_QNE = mix_QNR @ profiles_ER.t()
    return by_distance_QNE.gather(-1, at_QL[:, None].expand(-1, mix_QNR.shape[1], -1))
