"""Operations of attention over a window of tokens and over compressed ones (DeepSeek-V4).

A token keeps a row of W numbers in pages [2, P, 1, S, W / 2], half of it in each plane: its key, which is its value too, and
what compressors need of it. A compressed token stands in the page of the last of its `rate` tokens, E of them in a page.

Legend: T tokens, N heads, H head size, P pages, S tokens a page, E compressed tokens a page, R rate, K chosen, V values of a
vector with its indexer's behind it, L vectors a token has for a compressor (two where windows overlap).
"""

import dataclasses

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata
from quire.kernels.attention import kept_slots, rotate
from quire.kernels.registry import operation, reference
from quire.kernels.sparse import MOST_VALUES, rows_of_tokens
from quire.kernels.types import Compressor, Rope


@operation
def rotate_last(x_TNH: Tensor, rope: Rope, positions_T: Tensor, backwards: bool = False) -> None:
    """Rotate the last values of each head, in place, or turn them back."""
    cos_sin = rope.cos_sin[positions_T.long()]
    if backwards:
        cos, sin = cos_sin.chunk(2, dim=-1)
        cos_sin = torch.cat((cos, -sin), dim=-1)
    last = slice(x_TNH.shape[-1] - rope.rotary_dim, None)
    x_TNH[..., last] = rotate(x_TNH[..., last].float(), cos_sin, rope).to(x_TNH.dtype)


@operation
def keep_rows(rows_TW: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
    """Write each token's row to its slot; slots below 0 are skipped."""
    kept, pages, offsets = kept_slots(metadata, len(rows_TW))
    for plane, half in zip(kv_cache, rows_TW[kept].chunk(2, dim=1), strict=True):
        plane[pages, 0, offsets] = half.to(plane.dtype)


def _rows_at(kv_cache: Tensor, metadata: AttentionMetadata, row_X: Tensor, position_XY: Tensor) -> Tensor:
    """The rows [X, Y, W] of tokens at positions of a request, by its row in the block table."""
    pages = metadata.block_table[row_X[:, None], position_XY // metadata.block_size].long()
    offsets = position_XY % metadata.block_size
    return torch.cat([plane[pages, 0, offsets] for plane in kv_cache], dim=-1).float()


def _blocks_at(
    blocks_PEV: Tensor, metadata: AttentionMetadata, row_X: Tensor, block_XY: Tensor, rate: int
) -> tuple[Tensor, Tensor]:
    """Pages and places of compressed tokens."""
    last_XY = block_XY * rate + rate - 1
    pages = metadata.block_table[row_X[:, None], last_XY // metadata.block_size].long()
    return pages, last_XY % metadata.block_size // rate


@operation
def compress(
    compressor: Compressor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    blocks_PEV: Tensor,
    blocks_metadata: AttentionMetadata,
) -> None:
    """Make a compressed token of each R whose last one is of this step. Value by value it is the sum of softmax(weights) * values
    over the R; where windows overlap over the R before with their first vector besides, of which the first window has none."""
    rate, size, tokens = compressor.rate, compressor.size, metadata.num_tokens
    position_T = metadata.positions[:tokens].long()
    closes_T = ((position_T + 1) % rate == 0) & (metadata.slot_mapping[:tokens] >= 0)
    last_X, row_X = position_T[closes_T], rows_of_tokens(metadata, tokens)[closes_T]
    if not len(last_X):
        return
    within = torch.arange(1 - rate, 1, device=last_X.device)
    length = size * (2 if compressor.overlaps else 1)
    values, weights = _window(compressor, kv_cache, metadata, row_X, last_X[:, None] + within, length)
    if compressor.overlaps:  # the second vector of this window's tokens, the first one of those before
        before = last_X[:, None] + within - rate
        old_values, old_weights = _window(compressor, kv_cache, metadata, row_X, before.clamp(min=0), length)
        old_weights = old_weights.masked_fill(before[..., None] < 0, float("-inf"))
        old_values = old_values.masked_fill(before[..., None] < 0, 0.0)  # any memory's values
        values = torch.cat((old_values[..., :size], values[..., size:]), dim=1)
        weights = torch.cat((old_weights[..., :size], weights[..., size:]), dim=1)
    block_XV = (values * weights.softmax(dim=1)).sum(1)
    block_XV = block_XV * torch.rsqrt(block_XV.square().mean(-1, keepdim=True) + compressor.eps) * compressor.norm
    reference(rotate_last)(block_XV[:, None], compressor.rope, last_X + 1 - rate)
    pages, places = _blocks_at(blocks_PEV, blocks_metadata, row_X, (last_X // rate)[:, None], rate)
    part = slice(compressor.first, compressor.first + size)
    blocks_PEV[pages[:, 0], places[:, 0], part] = block_XV.to(blocks_PEV.dtype)


def _window(
    compressor: Compressor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    row_X: Tensor,
    position_XR: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    rows_XRW = _rows_at(kv_cache, metadata, row_X, position_XR)
    values, weights = rows_XRW[..., compressor.column : compressor.column + 2 * length].split(length, dim=-1)
    return values, weights + compressor.bias


@operation
def choose_blocks(
    q_TNI: Tensor,
    weights_TN: Tensor,
    blocks_PEV: Tensor,
    metadata: AttentionMetadata,
    rate: int,
    top_k: int,
) -> Tensor:
    """For each token [T, K] (int32) the `top_k` compressed tokens before it with the largest sum over heads of
    weight * relu(q . k); keys are their last values. -1 where there are fewer."""
    tokens, heads, size = q_TNI.shape
    count = metadata.num_requests
    starts, lengths, rows = (
        values[:many].tolist()
        for values, many in ((metadata.query_start, count + 1), (metadata.seq_lens, count), (metadata.rows, count))
    )
    most = min(top_k, max(lengths, default=0) // rate)
    chosen_TK = torch.full((tokens, most), -1, dtype=torch.int32, device=q_TNI.device)
    for b in range(count):
        start, end, blocks = starts[b], starts[b + 1], lengths[b] // rate
        if start == end or not blocks:
            continue
        block_L = torch.arange(blocks, device=q_TNI.device)
        row = torch.tensor([rows[b]], device=q_TNI.device)
        pages, places = _blocks_at(blocks_PEV, metadata, row, block_L[None], rate)
        keys_LI = blocks_PEV[pages[0], places[0], -size:].float()
        part = max(MOST_VALUES // (heads * blocks), 1)
        for first in range(start, end, part):
            some = slice(first, min(first + part, end))
            scores_QNL = torch.einsum("qni,li->qnl", q_TNI[some].float(), keys_LI).relu_()
            scores_QL = torch.einsum("qn,qnl->ql", weights_TN[some].float(), scores_QNL)
            there_Q1 = (metadata.positions[some, None].long() + 1) // rate
            scores_QL.masked_fill_(block_L >= there_Q1, float("-inf"))
            best_QK = scores_QL.topk(min(top_k, blocks), dim=-1).indices
            chosen_TK[some, : best_QK.shape[1]] = best_QK.masked_fill(best_QK >= there_Q1, -1).int()
    return chosen_TK


@dataclasses.dataclass
class _Seen:
    """Keys [Q, L, H] of some tokens, and which of them are hidden [Q, L]."""

    keys: Tensor
    hidden: Tensor


@operation
def window_attention(
    q_TNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    window: int,
    sinks_N: Tensor,
    out_TNH: Tensor,
    blocks_PEV: Tensor | None = None,
    blocks_metadata: AttentionMetadata | None = None,
    rate: int = 0,
    chosen_TK: Tensor | None = None,
) -> None:
    """Attention of each token to the `window` last tokens and to all (or the chosen) compressed ones whose last token is not
    behind it, with scores divided by sqrt(H) and a sink a head."""
    tokens, _, size = q_TNH.shape
    row_T, position_T = rows_of_tokens(metadata, tokens), metadata.positions[:tokens].long()
    every = max(metadata.max_seq_len, 1) // rate if blocks_PEV is not None else 0
    blocks = every if chosen_TK is None else chosen_TK.shape[1]
    part = max(MOST_VALUES // ((window + blocks) * 2 * kv_cache.shape[-1]), 1)
    for first in range(0, tokens, part):
        some = slice(first, min(first + part, tokens))
        seen = _window_keys(kv_cache, metadata, row_T[some], position_T[some], window, size)
        if blocks_PEV is not None and blocks_metadata is not None and blocks:
            chosen_QK = None if chosen_TK is None else chosen_TK[some].long()
            more = _block_keys(
                blocks_PEV, blocks_metadata, row_T[some], position_T[some], rate, chosen_QK, blocks, size
            )
            seen = _Seen(torch.cat((seen.keys, more.keys), dim=1), torch.cat((seen.hidden, more.hidden), dim=1))
        scores_QNL = torch.einsum("qnh,qlh->qnl", q_TNH[some].float(), seen.keys) * size**-0.5
        scores_QNL.masked_fill_(seen.hidden[:, None], float("-inf"))
        sinks = sinks_N.float()[None, :, None].expand(len(scores_QNL), -1, 1)
        weights_QNL = torch.softmax(torch.cat((scores_QNL, sinks), dim=-1), dim=-1)[..., :-1]
        out_TNH[some] = torch.einsum("qnl,qlh->qnh", weights_QNL, seen.keys).to(out_TNH.dtype)


def _window_keys(
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    row_Q: Tensor,
    position_Q: Tensor,
    window: int,
    size: int,
) -> _Seen:
    position_QL = position_Q[:, None] + torch.arange(1 - window, 1, device=row_Q.device)
    hidden_QL = position_QL < 0
    keys_QLH = _rows_at(kv_cache, metadata, row_Q, position_QL.clamp(min=0))[..., :size]
    return _Seen(keys_QLH.masked_fill(hidden_QL[..., None], 0.0), hidden_QL)


def _block_keys(
    blocks_PEV: Tensor,
    metadata: AttentionMetadata,
    row_Q: Tensor,
    position_Q: Tensor,
    rate: int,
    chosen_QK: Tensor | None,
    count: int,
    size: int,
) -> _Seen:
    if chosen_QK is None:
        chosen_QK = torch.arange(count, device=row_Q.device).expand(len(row_Q), -1)
    hidden_QK = (chosen_QK < 0) | (chosen_QK >= (position_Q[:, None] + 1) // rate)
    pages, places = _blocks_at(blocks_PEV, metadata, row_Q, chosen_QK.masked_fill(hidden_QK, 0), rate)
    keys_QKH = blocks_PEV[pages, places, :size].float()
    return _Seen(keys_QKH.masked_fill(hidden_QK[..., None], 0.0), hidden_QK)
