"""What requests may need of a device's sampler beyond plain sampling, and a small batch that uses each of it.

A feature's kernels are compiled, and the libraries' are loaded, when they are first launched. The batches here launch all of a
feature's once, apart from the steps, so that no step has to wait for them. Knows sampling parameters and the sampler; knows
nothing of steps.

Legend: S rows of a batch, V vocabulary.
"""

from collections.abc import Mapping

import numpy as np
import torch

from quire.kernels import ops
from quire.kernels.step import SampleColumns
from quire.platforms.interface import DeviceMemory
from quire.sample import features
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams, Thinking

_TOKEN = 7
_LONG_PROMPT = list(range(20))
_USES: Mapping[str, SamplingParams] = {
    features.FILTERS: SamplingParams(top_k=5, top_p=0.9, min_p=0.01),
    features.PENALTIES: SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
    features.LOGPROBS: SamplingParams(logprobs=5),
    features.MANY_LOGPROBS: SamplingParams(logprobs=features.FEW_LOGPROBS + 1),
    features.NAMED_LOGPROBS: SamplingParams(logprob_token_ids=[_TOKEN, _TOKEN + 1]),
    features.PROMPT_LOGPROBS: SamplingParams(prompt_logprobs=5),
    features.EDITS: SamplingParams(logit_bias={_TOKEN: 1.0}),
    features.ALLOWED: SamplingParams(allowed_token_ids=[_TOKEN, _TOKEN + 1]),
    features.BAD_WORDS: SamplingParams(bad_words_token_ids=[[_TOKEN], [_TOKEN, _TOKEN]]),
    features.FORCED: SamplingParams(thinking_token_budget=0, thinking=Thinking(end=[_TOKEN])),
    features.FORMS: SamplingParams(),
}
"""By feature, parameters that use it."""
_COUNTS = (1, 3)
"""Rows of a batch."""


class FeatureBatches:
    """A sampler of its own, and the batches that use each feature once.

    Args:
        sampler: the steps' sampler, for tables that it would make when the first request needs them.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, memory: DeviceMemory, logprobs_mode: str) -> None:
        self._steps_sampler = sampler
        rows = max(_COUNTS)
        device = memory.device()
        self._sampler = type(sampler)(rows, vocab_size, memory, logprobs_mode)
        self._vocab_size, self._memory, self._device = vocab_size, memory, device
        self._is_processed = logprobs_mode.startswith("processed")
        self._out_S = torch.zeros(rows, dtype=torch.int32, device=device)
        self._last_token_R = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._columns = SampleColumns(
            rows_S=torch.arange(rows, dtype=torch.int32, device=device),
            positions_S=torch.zeros(rows, dtype=torch.int32, device=device),
            inverse_temperature_S=torch.ones(rows, dtype=torch.float32, device=device),
            seed_S=torch.zeros(rows, dtype=torch.int64, device=device),
            top_k_S=torch.full((rows,), 5, dtype=torch.int32, device=device),
            top_p_S=torch.full((rows,), 0.9, dtype=torch.float32, device=device),
            min_p_S=torch.full((rows,), 0.01, dtype=torch.float32, device=device),
        )

    def run(self, name: str) -> None:
        """Use a feature, in batches of several sizes, greedy and random."""
        for count in _COUNTS:
            for temperature in (0.0, 0.8):
                self._sample(name, count, temperature)
            if name == features.FORMS:
                self._sample_masked(count)
            elif name == features.PROMPT_LOGPROBS:
                self._compute_prompt_logprobs(count)
        if name == features.FORMS:
            self._steps_sampler.masks.reserve(0, 0)

    def _logits(self, count: int) -> torch.Tensor:
        """[S, V]: a few large ones, as models make them, and many that are equal."""
        logits_SV = torch.zeros((count, self._vocab_size), dtype=torch.float32, device=self._device)
        logits_SV[:, : min(64, self._vocab_size)] += 4.0
        return logits_SV

    def _sample(self, name: str, count: int, temperature: float) -> None:
        sampler, params = self._sampler, _USES[name].clone()
        params.temperature = temperature
        if name == features.FILTERS and self._is_processed:
            params.logprobs = 1  # of what the filters leave
        for row in range(count):
            sampler.add_row(row, params, _LONG_PROMPT, [], row)
        try:
            rows_S = np.arange(count, dtype=np.int32)
            positions_S = np.full(count, len(_LONG_PROMPT), dtype=np.int32)
            wanted = sampler.wanted(rows_S, positions_S)
            out_S = self._out_S[:count]
            sampled = sampler.sample(self._logits(count), self._columns, rows_S, positions_S, wanted, out_S)
            ops.keep_tokens(out_S, self._columns.rows_S[:count], self._last_token_R)
            for tensor in sampled.tensors.values():
                host = self._memory.host_empty(tensor.shape, tensor.dtype)
                host.copy_(tensor, non_blocking=True)
        finally:
            for row in range(count):
                sampler.remove_row(row)

    def _sample_masked(self, count: int) -> None:
        sampler = self._sampler
        masks_NW, numbers_S = sampler.masks.reserve(1, count)
        masks_NW.fill(-1)
        numbers_S[0] = 0
        sampler.masks.upload(1)
        sampler.compute_masked(self._logits(count), self._columns, self._out_S[:count])

    def _compute_prompt_logprobs(self, count: int) -> None:
        for alternatives in (0, 5):
            self._sampler.table.num_prompt_logprobs_R[0] = alternatives
            tokens_N = np.full(count, _TOKEN, dtype=np.int32)
            self._sampler.compute_prompt_logprobs(self._logits(count), tokens_N, 0)
