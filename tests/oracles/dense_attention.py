"""Attention without pages, in float32: the oracle of every backend; and drawn steps over pages of several memory layouts.

Legend: T tokens of the step, B requests, N query heads, K KV heads, H head size, L tokens of a request, P pages.
"""

import dataclasses

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.attention.reference import ReferenceBackend
from quire.config.kv_spec import KVCacheSpec, KVKind


def attend(
    q_QNH: torch.Tensor,
    k_LKH: torch.Tensor,
    v_LKH: torch.Tensor,
    params: AttentionParams,
    seen_end_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last Q tokens of one request over all L of it, key by key as the words of `AttentionParams` say."""
    length, new = k_LKH.shape[0], q_QNH.shape[0]
    group = params.num_heads // params.num_kv_heads
    out_QNH = torch.zeros_like(q_QNH)
    for i in range(new):
        position = length - new + i
        seen = [
            p for p in range(length) if _sees(position, p, params, _is_ahead(i, p - length + new, position, seen_end_Q))
        ]
        for head in range(params.num_heads):
            keys, values = (side[seen, head // group].float() for side in (k_LKH, v_LKH))
            scores = keys @ q_QNH[i, head].float() * params.scale
            if params.soft_cap > 0:
                scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
            if params.alibi_slopes is not None:
                scores = scores + params.alibi_slopes[head] * (torch.tensor(seen) - position)
            weights = scores.exp()
            total = weights.sum() + (0.0 if params.sinks is None else params.sinks[head].exp())
            out_QNH[i, head] = (weights / total) @ values
    return out_QNH


def _is_ahead(query: int, key: int, position: int, seen_end_Q: torch.Tensor | None) -> bool:
    """Whether a key behind a query is of the same items."""
    if seen_end_Q is None or key <= query:
        return False
    end = int(seen_end_Q[query])
    return position + key - query < end == int(seen_end_Q[key])


def _sees(position: int, other: int, params: AttentionParams, is_ahead: bool) -> bool:
    if params.chunk and position // params.chunk != other // params.chunk:
        return False
    if not params.causal:
        return params.window == 0 or abs(position - other) <= params.window // 2
    return (other <= position or is_ahead) and (params.window == 0 or position - other < params.window)


@dataclasses.dataclass
class Step:
    """Requests whose keys and values are in shuffled pages; slots beyond a request's end hold NaN.

    Attributes:
        lengths: (new tokens, tokens of the context with them) of each request.
        keys, values: each request's [L, K, H].
    """

    lengths: list[tuple[int, int]]
    qkv_TC: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams

    def expected(self) -> torch.Tensor:
        parts, start, params = [], 0, self.params
        for (new, _), keys, values in zip(self.lengths, self.keys, self.values, strict=True):
            q_QC = self.qkv_TC[start : start + new, : params.num_heads * params.head_dim]
            ends_Q = None if self.metadata.seen_end is None else self.metadata.seen_end[start : start + new]
            q_QNH = q_QC.view(new, params.num_heads, params.head_dim)
            parts.append(attend(q_QNH, keys, values, params, ends_Q).flatten(1))
            start += new
        return torch.cat(parts)

    def new_out(self) -> torch.Tensor:
        return torch.full_like(
            self.qkv_TC[:, : self.params.num_heads * self.params.head_dim], float("nan")
        ).contiguous()


def draw_step(
    lengths: list[tuple[int, int]],
    params: AttentionParams,
    *,
    page: int = 16,
    layout: str = "planes",
    writes: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """A step.

    Args:
        layout: of the pages: "planes" is one tensor for this kind of layer; "shared" a view of bytes that other layers use too;
            "latent" such a view in which keys are values.
        writes: the new tokens' keys and values are not in the pages yet (but in `qkv_TC`).
    """
    generator = torch.Generator().manual_seed(seed)
    k, h = params.num_kv_heads, params.head_dim
    counts = [-(-length // page) for _, length in lengths]
    num_pages = sum(counts) + 2
    kv_cache = _pages(num_pages, k, page, h, layout, dtype)
    kv_cache[0], kv_cache[1] = float("nan"), float("nan")
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    rows = torch.randperm(len(lengths) + 1, generator=generator)[: len(lengths)].int()
    table = torch.zeros(len(lengths) + 1, max(counts) + 1, dtype=torch.int32)
    tokens = sum(new for new, _ in lengths)
    qkv_TC = torch.randn(tokens, (params.num_heads + 2 * k) * h, generator=generator).to(dtype)
    sides_TKH = qkv_TC[:, params.num_heads * h :].view(tokens, 2, k, h)
    slots = torch.zeros(tokens, dtype=torch.int64)
    positions = torch.zeros(tokens, dtype=torch.int32)
    keys, values, token = [], [], 0
    for b, (new, length) in enumerate(lengths):
        pages = torch.tensor([free.pop() for _ in range(counts[b])])
        table[rows[b], : counts[b]] = pages.int()
        kv_2LKH = torch.randn(2, length, k, h, generator=generator).to(dtype)
        kv_2LKH[:, length - new :] = sides_TKH[token : token + new].transpose(0, 1)
        if layout == "latent":
            kv_2LKH[1] = kv_2LKH[0]
        at = torch.arange(length)
        pages_L, offsets_L = pages[at // page], at % page
        past = slice(0, length - new if writes else length)
        for side in range(2):
            kv_cache[side][pages_L[past], :, offsets_L[past]] = kv_2LKH[side, past]
        slots[token : token + new] = (pages_L * page + offsets_L)[length - new :]
        positions[token : token + new] = at[length - new :]
        keys.append(kv_2LKH[0])
        values.append(kv_2LKH[1])
        token += new
    news = [new for new, _ in lengths]
    shape = [tokens, len(lengths), max(news), max(length for _, length in lengths)]
    metadata = AttentionMetadata(
        block_size=page,
        query_start=torch.tensor([0, *news]).cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        rows=rows,
        block_table=table,
        slot_mapping=slots,
        positions=positions,
        shape=torch.tensor(shape),
        num_tokens=shape[0],
        num_requests=shape[1],
        max_query_len=shape[2],
        max_seq_len=shape[3],
        seen_end=_draw_items(lengths, generator) if params.sees_items else None,
    )
    return Step(lengths, qkv_TC, keys, values, kv_cache, metadata, params)


def _draw_items(lengths: list[tuple[int, int]], generator: torch.Generator) -> torch.Tensor:
    """In each request that computes several tokens items of some of them, often up to its end, which may have text between
    them: `seen_end`."""
    ends: list[int] = []
    for new, length in lengths:
        drawn = torch.randint(0, new + new // 3 + 1, (4,), generator=generator).clamp(max=new).sort()[0].tolist()
        first, text, again, last = drawn
        ends += [length - new + last if first <= token < text or again <= token < last else 0 for token in range(new)]
    return torch.tensor(ends, dtype=torch.int32)


def _pages(num_pages: int, k: int, page: int, h: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    planes = 1 if layout == "latent" else 2
    kind = KVKind.MLA if layout == "latent" else KVKind.FULL
    name = str(dtype).removeprefix("torch.")
    spec = KVCacheSpec(kind, page, planes * k * h * dtype.itemsize, num_kv_heads=k, head_dim=h, dtype=name)
    if layout == "planes":
        return ReferenceBackend().allocate(spec, num_pages, torch.device("cpu"))
    raw = torch.zeros(num_pages, (spec.page_bytes + 63) // 64 * 64 + 128, dtype=torch.uint8)
    return ReferenceBackend().view(raw, spec)
