"""Decode context parallelism: ranks that have the same KV head each keep every so-many-th token of a sequence, not all of them.

Of C neighbouring ranks, rank r keeps the positions p with p % C = r. A page of the scheduler has C times the tokens of a rank's
page, so tables of pages are the same everywhere. A step's own keys and values are with every rank, in pages of one step. Its
queries see them there, causally, and what came before in the pages of all C ranks: each computes that for the heads of all C, and
the parts are merged by the logarithms of their softmaxes' denominators (as flash decoding merges splits). Layers with windows
keep all of the few tokens that they see, on every rank.

Legend: T tokens, B requests, N heads of this rank, H head size, W = N * H, C ranks that share a context.
"""

import dataclasses
import math

import msgspec
import torch
from torch import Tensor

from quire.attention.around import AroundBackend, planes_of
from quire.attention.interface import AttentionMetadata, AttentionParams, Write
from quire.attention.paged import PagedBackend
from quire.config.kv_spec import KVCacheSpec
from quire.distributed.communicator import Communicator


@dataclasses.dataclass
class _Parts:
    """A step's description in two parts.

    Attributes:
        past: what was there before the step, in this rank's pages. `slots_T`: where it keeps the step's tokens; 0: it does not.
        fresh: the step's own tokens, in pages of their own: for T tokens of B requests T // S + B are enough.
    """

    past: AttentionMetadata
    fresh: AttentionMetadata
    slots_T: Tensor
    num_pages: int


class SplitContext(AroundBackend):
    """Another backend's kernels over a part of each context.

    Args:
        inner: gives logarithms of denominators.
        communicator: all ranks of the tensor-parallel group; those that share a context are neighbours.
        count: how many these are.
    """

    name = "split context"

    def __init__(self, inner: PagedBackend, communicator: Communicator, count: int) -> None:
        super().__init__(inner)
        self._ranks, self._count = communicator, count
        self._number = communicator.rank % count
        self._first = communicator.rank - self._number
        self._fresh_pages: Tensor | None = None

    def _spec(self, spec: KVCacheSpec) -> KVCacheSpec:
        """A layer's cache as the inner backend sees it."""
        return msgspec.structs.replace(spec, block_size=spec.block_size // spec.ranks, ranks=1)

    def _leaves(self, params: AttentionParams) -> bool:
        return bool(params.window or params.chunk)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        parts, tokens, requests = _parts_of(metadata, self._count), metadata.num_tokens, metadata.num_requests
        for part in (parts.past, parts.fresh):
            part.num_tokens, part.num_requests = tokens, requests
            part.max_query_len, part.max_seq_len = metadata.max_query_len, metadata.max_seq_len
        if not requests:
            return
        size, starts_B = parts.past.block_size, metadata.query_start[:requests]
        counts_B = metadata.query_start[1 : requests + 1] - starts_B
        before_B = metadata.seq_lens[:requests] - counts_B
        parts.past.seq_lens[:requests] = (before_B + (self._count - 1 - self._number)) // self._count
        slots_T = metadata.slot_mapping[:tokens]
        parts.slots_T[:tokens] = torch.where(slots_T % self._count == self._number, slots_T // self._count, 0).clamp(
            min=0
        )
        parts.fresh.seq_lens[:requests] = counts_B
        first_B = starts_B // size + parts.fresh.rows[:requests]  # pages of requests follow one another, with gaps
        columns = torch.arange(parts.fresh.block_table.shape[1], device=first_B.device)
        parts.fresh.block_table[:requests] = (first_B[:, None] + columns).clamp(max=parts.num_pages - 1)
        token_T = torch.arange(tokens, device=slots_T.device)
        request_T = torch.searchsorted(metadata.query_start[1 : requests + 1], token_T, right=True).clamp(
            max=requests - 1
        )
        own_T = first_B[request_T] * size + token_T - starts_B[request_T]
        parts.fresh.slot_mapping[:tokens] = torch.where(slots_T < 0, slots_T, own_T)

    def keep(self, write: Write, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        parts = _parts_of(metadata, self._count)
        fresh = self._pages_of_step(kv_cache, parts.num_pages)
        write(fresh, parts.fresh)
        size, tokens = parts.past.block_size, metadata.num_tokens
        here_T, there_T = parts.fresh.slot_mapping[:tokens].clamp(min=0), parts.slots_T[:tokens]
        fresh = planes_of(fresh)
        planes_of(kv_cache)[:, there_T // size, :, there_T % size] = fresh[:, here_T // size, :, here_T % size]

    def _pages_of_step(self, kv_cache: Tensor, num_pages: int) -> Tensor:
        """Pages for the keys and values of one step, which all layers use one after another."""
        shape = (kv_cache.shape[0] if kv_cache.stride(0) else 1, num_pages, *kv_cache.shape[2:])
        if self._fresh_pages is None or self._fresh_pages.shape != shape:
            self._fresh_pages = torch.zeros(shape, dtype=kv_cache.dtype, device=kv_cache.device)
        return self._fresh_pages.expand(kv_cache.shape[0], *shape[1:])

    def forward(
        self, qkv: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, params: AttentionParams, out: Tensor
    ) -> None:
        if self._leaves(params):
            self._inner.forward(qkv, kv_cache, metadata, params, out)
            return
        parts, tokens, heads = _parts_of(metadata, self._count), len(qkv), params.num_heads
        sinks, params = params.sinks, dataclasses.replace(params, sinks=None)
        fresh, count = self._pages_of_step(kv_cache, parts.num_pages), self._count
        # Everybody's queries over what is here, and what everybody has over the queries of here.
        (asked_CTW,) = self._exchange(qkv[:, : heads * params.head_dim].expand(count, -1, -1))
        asked_TX = asked_CTW.transpose(0, 1).reshape(tokens, -1)
        given_TX = asked_TX.new_zeros(tokens, count * heads * params.value_dim)
        lse_TX = asked_TX.new_zeros((tokens, count * heads), dtype=torch.float32)
        whole = dataclasses.replace(params, num_heads=count * heads, causal=False)
        self._inner.forward(asked_TX, kv_cache, parts.past, whole, given_TX, lse_TX)
        by_rank = (each.view(tokens, count, -1).transpose(0, 1) for each in (given_TX, lse_TX))
        given_CTW, lse_CTN = self._exchange(*by_rank)
        own_TN = lse_TX.new_zeros(tokens, heads)
        self._inner.forward(qkv, fresh, parts.fresh, params, out, own_TN)
        scores = [lse_CTN, own_TN[None]]
        if sinks is not None:
            scores.append(sinks.float().expand(1, tokens, heads))
        share_CTN = torch.softmax(torch.cat(scores), dim=0)[: count + 1]
        all_CTNH = torch.cat((given_CTW, out[None])).float().view(*share_CTN.shape, params.value_dim)
        out.copy_((share_CTN[..., None] * all_CTNH).sum(0).flatten(1))

    def _exchange(self, *tensors_CTX: Tensor) -> list[Tensor]:
        """Part c goes to the rank c of those that share the context, of all tensors at once; what they have sent here."""
        parts = [each.contiguous().view(torch.uint8) for each in tensors_CTX]
        count, tokens = parts[0].shape[:2]
        rows = [0] * self._ranks.size
        rows[self._first : self._first + count] = [tokens] * count
        sent = torch.cat(parts, dim=2).flatten(0, 1)
        came = torch.zeros_like(sent)  # of a silent rehearsal
        self._ranks.all_to_all(sent, rows, came, rows)
        came_CTX = came.view(count, tokens, -1).split([part.shape[2] for part in parts], dim=2)
        return [part.contiguous().view(each.dtype) for part, each in zip(came_CTX, tensors_CTX, strict=True)]


def _parts_of(metadata: AttentionMetadata, count: int) -> _Parts:
    """Made once for each description, as the tensors of which it consists are."""
    if isinstance(metadata.parts, _Parts):
        return metadata.parts
    size, tokens, requests = metadata.block_size // count, len(metadata.slot_mapping), len(metadata.seq_lens)
    nothing = {"short_tokens": 0, "seen_end": None, "parts": None}
    past = dataclasses.replace(metadata, block_size=size, seq_lens=torch.zeros_like(metadata.seq_lens), **nothing)
    like = metadata.block_table
    fresh = dataclasses.replace(
        past,
        seq_lens=torch.zeros_like(metadata.seq_lens),
        rows=torch.arange(requests, dtype=metadata.rows.dtype, device=like.device),
        block_table=like.new_zeros(requests, math.ceil(tokens / size)),
        slot_mapping=torch.zeros_like(metadata.slot_mapping),
    )
    metadata.parts = _Parts(past, fresh, torch.zeros_like(metadata.slot_mapping), tokens // size + requests)
    return metadata.parts
