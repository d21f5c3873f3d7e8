"""Short ways to drive a sampler."""

from typing import Any

import numpy as np
import torch
from tests.oracles.plain_sampler import PlainSampler, SamplerOutput

from quire.kernels.step import SampleColumns, allocate_columns
from quire.platforms.interface import HostMemory
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams

VOCAB = 97


def make_sampler(
    *, vocab: int = VOCAB, rows: int = 64, mode: str = "raw_logprobs", processors: list[LogitsProcessor] | None = None
) -> Sampler:
    """A sampler on the CPU."""
    return Sampler(rows, vocab, HostMemory(), mode, processors)


def make_plain_sampler(
    *, vocab: int = VOCAB, rows: int = 64, mode: str = "raw_logprobs", processors: list[LogitsProcessor] | None = None
) -> PlainSampler:
    """What it must agree with."""
    return PlainSampler(rows, vocab, mode, processors)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Float32 logits [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def add(sampler: Sampler, row: int, *, prompt: Any = (), output: Any = (), seed: int = 0, **params: Any) -> None:
    """A request with these sampling parameters takes a row."""
    sampler.add_row(row, SamplingParams(**params), list(prompt), list(output), seed)


def columns_of(sampler: Sampler, rows_S: np.ndarray, positions_S: np.ndarray) -> SampleColumns:
    """What a runner would have packed; longer than the batch, as its buffers are."""
    columns = allocate_columns(len(rows_S) + 3, torch.device("cpu"))
    sampler.table.pack(rows_S, positions_S, columns)
    return columns


def draw(sampler: Sampler, logits_SV: torch.Tensor, rows: Any, positions: Any) -> SamplerOutput:
    """A step as a runner drives it, its results fetched at once; the logits stay as they are."""
    rows_S, positions_S = np.asarray(rows, dtype=np.int32), np.asarray(positions, dtype=np.int32)
    masks = sampler.begin_masks(rows_S, positions_S)
    wanted = sampler.wanted(rows_S, positions_S)
    out_S = torch.full((len(rows_S),), -7, dtype=torch.int32)
    columns, logits_SV = columns_of(sampler, rows_S, positions_S), logits_SV.clone()
    if masks is not None and sampler.is_masked_alone(wanted, rows_S):
        sampled = sampler.upload_masks(masks, rows_S)
        sampler.compute_masked(logits_SV, columns, out_S)
    else:
        sampled = sampler.sample(logits_SV, columns, rows_S, positions_S, wanted, out_S, masks)
    host = {name: tensor.clone() for name, tensor in sampled.tensors.items()}
    output = SamplerOutput(out_S.numpy().copy(), sampler.finish(sampled, host), sampled.errors)
    sampler.append_tokens(rows_S, output.token_ids, positions_S)
    return output


def processed_probabilities(sampler: Sampler, logits: torch.Tensor, row: int, position: int) -> np.ndarray:
    """What a `processed_logprobs` sampler draws this row from; the row asks for all logprobs."""
    result = draw(sampler, logits[None], [row], [position]).logprobs[row]
    probabilities = np.zeros(len(logits))
    probabilities[result.token_ids[0][1:]] = np.exp(result.logprobs[0][1:])
    return probabilities
