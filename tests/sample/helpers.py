"""Short ways to drive a sampler."""

from typing import Any

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor
from quire.sample.sampler import Sampler, SamplerOutput
from quire.sampling_params import SamplingParams

VOCAB = 97


def make_sampler(
    *, vocab: int = VOCAB, rows: int = 64, mode: str = "raw_logprobs", processors: list[LogitsProcessor] | None = None
) -> Sampler:
    """A sampler on the CPU."""
    return Sampler(rows, vocab, torch.device("cpu"), mode, processors)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Float32 logits [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def add(sampler: Sampler, row: int, *, prompt: Any = (), output: Any = (), seed: int = 0, **params: Any) -> None:
    """A request with these sampling parameters takes a row."""
    sampler.add_row(row, SamplingParams(**params), list(prompt), list(output), seed)


def draw(sampler: Sampler, logits: torch.Tensor, rows: Any, positions: Any) -> SamplerOutput:
    """Sample, leaving the logits as they are."""
    return sampler.sample(logits.clone(), np.asarray(rows, dtype=np.int32), np.asarray(positions, dtype=np.int32))


def processed_probabilities(sampler: Sampler, logits: torch.Tensor, row: int, position: int) -> np.ndarray:
    """What a `processed_logprobs` sampler draws this row from; the row asks for all logprobs."""
    result = draw(sampler, logits[None], [row], [position]).logprobs[row]
    probabilities = np.zeros(len(logits))
    probabilities[result.token_ids[0][1:]] = np.exp(result.logprobs[0][1:])
    return probabilities
