"""Prefill context parallelism: ranks that all have every page share the tokens of long prompts' steps.

A rank computes its tokens alone. Their keys and values are written to its own pages, and from there brought to the same slots of
the others', so that whatever kernel attends, windows and sinks included, finds what it expects.

Legend: T tokens of a step, R ranks, M the most tokens of a rank.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from quire.attention.around import AroundBackend, planes_of
from quire.attention.interface import AttentionMetadata, AttentionParams, Write
from quire.attention.paged import PagedBackend
from quire.distributed.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class PromptShare:
    """A rank's tokens of a step: `first` and on, `last` not among them. All ranks but the last ones have `most`."""

    first: int
    last: int
    most: int

    @classmethod
    def of(cls, num_tokens: int, rank: int, size: int) -> "PromptShare":
        """The share of one of the ranks."""
        most = -(-num_tokens // size)
        return cls(min(rank * most, num_tokens), min((rank + 1) * most, num_tokens), most)

    def describe(self, metadata: AttentionMetadata, slots_RM: Tensor) -> AttentionMetadata:
        """A step's description as one of these tokens alone: each request computes those of its own that are here, and its
        context ends with them.

        Args:
            slots_RM: of all ranks' tokens.
        """
        count, ends_B = self.last - self.first, metadata.query_start[1:]
        start_B1 = (metadata.query_start - self.first).clamp(0, count)
        num_requests = len(metadata.seq_lens)
        behind_B = (ends_B[:num_requests] - self.last).clamp(min=0)
        has_some_B = start_B1[1 : num_requests + 1] > start_B1[:num_requests]
        shape = metadata.shape.clone()
        shape[0] = (shape[0] - self.first).clamp(0, count)
        shape[2] = shape[2].clamp(max=count)
        return dataclasses.replace(
            metadata,
            query_start=start_B1,
            seq_lens=torch.where(has_some_B, metadata.seq_lens - behind_B, 0).to(metadata.seq_lens.dtype),
            slot_mapping=metadata.slot_mapping[self.first : self.last],
            positions=metadata.positions[self.first : self.last],
            shape=shape,
            num_tokens=count,
            max_query_len=min(metadata.max_query_len, count),
            decodes=True,
            short_tokens=0,
            parts=slots_RM,
        )


class SplitPrompt(AroundBackend):
    """Another backend's kernels for a rank's tokens of a step.

    Args:
        ranks: those that share the tokens of prompts.
    """

    name = "split prompt"

    def __init__(self, inner: PagedBackend, ranks: Communicator) -> None:
        super().__init__(inner)
        self._ranks = ranks

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._inner.begin_step(metadata)

    def keep(self, write: Write, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        write(kv_cache, metadata)
        slots_RM = metadata.parts
        if slots_RM is None:
            return
        pages, size, mine_M = planes_of(kv_cache), metadata.block_size, slots_RM[self._ranks.rank]
        sent = pages[:, mine_M // size, :, mine_M % size].contiguous()
        came = sent.new_zeros(self._ranks.size, *sent.shape)
        self._ranks.all_gather(sent, came)
        there_T = slots_RM.flatten()
        pages[:, there_T // size, :, there_T % size] = came.flatten(0, 1)

    def forward(
        self, qkv: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, params: AttentionParams, out: Tensor
    ) -> None:
        self._inner.forward(qkv, kv_cache, metadata, params, out)

    def attend(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: Tensor,
        rope: Any,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        whole = self._inner if metadata.parts is None else super()
        whole.attend(qkv, kv_cache, metadata, params, out, rope, q_norm, k_norm, eps)
