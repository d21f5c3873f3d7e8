"""What tests compute of the conformance suite's batches and operations: attention by the reference, and one run of a kernel."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata
from quire.conformance.cases import states
from quire.conformance.cases.batches import Batch, reference
from quire.kernels import registry


def expected(batch: Batch) -> Tensor:
    """Attention by the reference of a batch that is prepared; rows of no request are NaN."""
    tokens, requests, longest_query, longest = batch.metadata.shape.tolist()  # the step's own counts, not a graph's
    real = dataclasses.replace(
        batch.metadata,
        num_tokens=tokens,
        num_requests=requests,
        max_query_len=longest_query,
        max_seq_len=longest,
    )
    out_TC = batch.new_out().float()
    reference("paged_attention")(batch.qkv_TC, batch.plain_pages(), real, batch.params, out_TC)
    return out_TC


def implementation(op: str, platform: str) -> Callable[..., None]:
    """A platform's kernel of an operation; `any` is the reference."""
    return next(k.function for k in registry.implementations(op) if k.platform == platform)


class Operation(states.Operation):
    """An operation with rows to run it over."""

    def draw(self, tokens: int, seed: int) -> Tensor:
        return torch.randn(tokens, sum(self.widths) + 3, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def run(self, platform: str, rows: Tensor, states: Tensor, metadata: AttentionMetadata) -> Tensor:
        parts = rows[:, : sum(self.widths)].split(self.widths, dim=1)
        inputs = [part.unflatten(1, shape) for part, shape in zip(parts, self.inputs, strict=True)]
        out = torch.full((len(rows) + 1, *self.out), float("nan"), device=self.device)
        implementation(self.name, platform)(*self.arguments(*inputs, states, metadata, out[: len(rows)]))
        assert out[len(rows)].isnan().all(), "wrote beyond its rows"
        return out[: len(rows)]
