"""Batches of requests over shuffled pages, for tests of attention kernels.

Legend: T tokens, B requests, N query heads, K KV heads, H head size, R rotary size.
"""

import dataclasses
import importlib
from collections.abc import Sequence

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels import registry
from quire.kernels.types import Rope

MAX_POSITIONS = 512


def reference(op: str):
    importlib.import_module("quire.kernels.ops")

    return next(k.function for k in registry.implementations(op) if k.platform == "any")


@dataclasses.dataclass
class Batch:
    """A step: qkv as the projection gives it, pages whose past is filled, and the description of its requests."""

    qkv_TC: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams
    rope: Rope | None = None
    q_norm_H: torch.Tensor | None = None
    k_norm_H: torch.Tensor | None = None
    eps: float = 1e-6

    def copy(self) -> "Batch":
        return dataclasses.replace(self, qkv_TC=self.qkv_TC.clone(), kv_cache=self.kv_cache.clone())

    def prepared(self) -> "Batch":
        """After norms, rotation and writing, by the reference; fp8 pages hold scaled values."""
        params, batch = self.params, self.copy()
        is_fp8 = self.kv_cache.dtype == torch.float8_e4m3fn
        pages = self.plain_pages() if is_fp8 else batch.kv_cache
        heads = (params.num_heads, params.num_kv_heads, params.head_dim)
        norms = (self.q_norm_H, self.k_norm_H, self.eps)
        reference("rope_and_cache")(batch.qkv_TC, pages, self.metadata, *heads, self.rope, *norms)
        if is_fp8:
            for side, scale in enumerate((params.k_scale, params.v_scale)):
                batch.kv_cache[side] = (pages[side] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return batch

    def plain_pages(self) -> torch.Tensor:
        """The pages as float32, scales undone."""
        pages = self.kv_cache.float()
        if self.kv_cache.dtype == torch.float8_e4m3fn:
            pages[0] *= self.params.k_scale
            pages[1] *= self.params.v_scale
        return pages

    def new_out(self) -> torch.Tensor:
        params = self.params
        return torch.full(
            (self.qkv_TC.shape[0], params.num_heads * params.head_dim), float("nan"), dtype=self.qkv_TC.dtype
        )


def describe(
    table_RP: torch.Tensor, page: int, work: Sequence[tuple[int, int, int]], padding: int = 0
) -> AttentionMetadata:
    """A step over pages of a table: for each (row, tokens computed before, tokens of the step).

    Args:
        padding: tokens, and requests, by which the sizes exceed the step's own.
    """
    rows, before, counts = (torch.tensor(column) for column in zip(*work, strict=True))
    at = [torch.arange(start, start + count) for _, start, count in work]
    slots = [table_RP[row, at_T // page].long() * page + at_T % page for (row, *_), at_T in zip(work, at, strict=True)]
    shape = [int(counts.sum()), len(work), int(counts.max()), int((before + counts).max())]
    nothing = torch.zeros(padding, dtype=torch.int64)
    return AttentionMetadata(
        block_size=page,
        query_start=torch.cat((torch.zeros(1), counts, nothing)).cumsum(0).int(),
        seq_lens=torch.cat((before + counts, nothing)).int(),
        rows=torch.cat((rows, nothing)).int(),
        block_table=table_RP,
        slot_mapping=torch.cat([*slots, nothing - 1]),
        positions=torch.cat([*at, nothing]).int(),
        shape=torch.tensor(shape),
        num_tokens=shape[0] + padding,
        num_requests=shape[1] + padding,
        max_query_len=shape[2],
        max_seq_len=shape[3],
        decodes=bool((counts == 1).any()),
    )


def make_batch(
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    has_norm: bool = False,
    has_alibi: bool = False,
    has_sinks: bool = False,
    padding: int = 0,
    seed: int = 0,
    **constants: float,
) -> Batch:
    """Requests of these lengths on shuffled pages; pages beyond a request's own tokens hold NaN (fp8 too).

    Args:
        padding: rows (one token and one request each) by which a graph's sizes exceed the step's.
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens = query_lens or [1] * len(seq_lens)
    counts = [-(-length // page) for length in seq_lens]
    order = torch.randperm(sum(counts) + 2, generator=generator) + 1
    rows = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)].tolist()
    table = torch.zeros(len(counts) + 2, max(counts) + 1, dtype=torch.int32)
    for row, pages in zip(rows, order[: sum(counts)].split(counts), strict=True):
        table[row, : len(pages)] = pages
    past = [length - new for length, new in zip(seq_lens, query_lens, strict=True)]
    metadata = describe(table, page, list(zip(rows, past, query_lens, strict=True)), padding)
    metadata.max_seq_len = max(MAX_POSITIONS, metadata.max_seq_len)
    cache = torch.full((2, len(order) + 1, num_kv_heads, page, head_dim), float("nan"))
    for row, length in zip(rows, past, strict=True):
        at = torch.arange(length)
        values = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator)
        cache[:, table[row, at // page].long(), :, at % page] = values
    kv_type = kv_dtype or dtype
    params = AttentionParams(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=constants.pop("scale", head_dim**-0.5),
        sinks=torch.randn(num_heads, generator=generator) if has_sinks else None,
        alibi_slopes=torch.rand(num_heads, generator=generator) * 0.2 if has_alibi else None,
        **constants,  # type: ignore[arg-type]
    )
    if kv_type == torch.float8_e4m3fn:
        cache[0], cache[1] = cache[0] / params.k_scale, cache[1] / params.v_scale
    rope = None
    if rotary_dim:
        rope = Rope(torch.randn(MAX_POSITIONS, rotary_dim, generator=generator), rotary_dim, interleaved)
    norms = [torch.rand(head_dim, generator=generator) + 0.5 if has_norm else None for _ in range(2)]
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(metadata.num_tokens, columns, generator=generator).to(dtype)
    return Batch(qkv, cache.to(kv_type), metadata, params, rope, norms[0], norms[1])
