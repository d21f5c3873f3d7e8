"""The sampler on the platform beside the same one with the references on the CPU: equal tokens, feature by feature, step by step.

Both read the same logits. What a row draws depends on its seed and position alone, so tokens are equal to the last one.
"""

import functools
from typing import Any

import numpy as np
import torch

from quire.conformance.contract import Subject, check, expect, other_kernels
from quire.kernels.step import allocate_columns
from quire.platforms.interface import DeviceMemory, HostMemory
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams

VOCABULARY, STEPS = 700, 6
LOGPROB_LIMIT = 1e-4
FEATURES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "seeded": [{"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 1.9}],
    "top-k": [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.2, "top_k": 40}],
    "top-p": [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.5, "top_p": 0.2}],
    "min-p": [{"temperature": 1.0, "min_p": 0.05}, {"temperature": 1.3, "min_p": 0.4, "top_k": 30}],
    "penalties": [
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"temperature": 0.9, "frequency_penalty": 0.8},
        {"temperature": 0.9, "repetition_penalty": 1.4, "top_p": 0.95},
    ],
    "bias": [{"temperature": 0.9, "logit_bias": {5: 4.0, 9: -100.0}}, {"temperature": 0.0, "logit_bias": {77: 20.0}}],
    "allowed-ids": [{"temperature": 1.0, "allowed_token_ids": [3, 50, 600]}],
    "bad-words": [{"temperature": 0.0, "bad_words_token_ids": [[5], [7, 8]]}],
    "min-tokens": [{"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [11, 12]}],
    "logprobs": [{"temperature": 0.0, "logprobs": 5}, {"temperature": 1.0, "logprobs": 0, "top_k": 9}],
}
FEATURES["mixed"] = [params for rows in FEATURES.values() for params in rows]


def draw(memory: DeviceMemory, rows: list[dict[str, Any]], seed: int) -> tuple[list[list[int]], list[float]]:
    """The tokens of each step, and all logprobs that came with them. Kernels must be selected."""
    sampler, device = Sampler(len(rows) + 2, VOCABULARY, memory), memory.device()
    generator = torch.Generator().manual_seed(seed)
    for row, params in enumerate(rows):
        sampler.add_row(row, SamplingParams(**params), [1, 2, 3, 5], [], seed + row)
    rows_S, tokens, logprobs = np.arange(len(rows), dtype=np.int32), [], []
    for step in range(STEPS):
        logits_SV = (torch.randn(len(rows), VOCABULARY, generator=generator) * 3).to(device)
        positions_S = np.full(len(rows), 4 + step, dtype=np.int32)
        masks, wanted = sampler.begin_masks(rows_S, positions_S), sampler.wanted(rows_S, positions_S)
        columns = allocate_columns(len(rows), torch.device("cpu"))
        sampler.table.pack(rows_S, positions_S, columns)
        for name, tensor in vars(columns).items():
            setattr(columns, name, tensor.to(device))
        out_S = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
        sampled = sampler.sample(logits_SV, columns, rows_S, positions_S, wanted, out_S, masks)
        host = {name: tensor.cpu() for name, tensor in sampled.tensors.items()}
        found = sampler.finish(sampled, host)
        token_ids = out_S.cpu().numpy()
        sampler.append_tokens(rows_S, token_ids, positions_S)
        tokens.append(token_ids.tolist())
        logprobs += [value for row in sorted(found) for values in found[row].logprobs for value in values]
    return tokens, logprobs


def check_feature(name: str, subject: Subject) -> str:
    """One feature."""
    rows = FEATURES[name]
    with other_kernels():
        expected, expected_logprobs = draw(HostMemory(), rows, subject.seed)
    with subject.kernels():
        got, logprobs = draw(subject.runtime, rows, subject.seed)
    expect(got == expected, "other tokens are drawn", expected, got)
    error = max((abs(ours - theirs) for ours, theirs in zip(logprobs, expected_logprobs, strict=True)), default=0.0)
    expect(error <= LOGPROB_LIMIT, "logprobs differ", f"at most {LOGPROB_LIMIT}", error)
    told = f", {len(logprobs)} logprobs off by {error:.0e}" if logprobs else ""
    return f"{len(rows) * STEPS} equal tokens{told}"


for _name in FEATURES:
    check(f"sampler/{_name}", f"sampling ({_name}) draws the tokens that the references on the CPU draw")(
        functools.partial(check_feature, _name)
    )
