"""Keys and values in fp8: whole models equal Transformers' with a cache that rounds them on their way in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.worker.test_end_to_end import make_prompts
from tests.worker.tiny_engine import TinyEngine, make_request
from transformers import DynamicCache

from quire.benchmarks.tiny_models import load_oracle, make_tiny_model
from quire.executor import uniproc


class RoundingCache(DynamicCache):
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def oracle_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    with torch.no_grad():
        cache = RoundingCache()
        logits = model(torch.tensor([prompt + tokens]), past_key_values=cache, use_cache=True).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), -1)
    return logprobs[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma"])
def test_logprobs_are_those_of_a_cache_that_rounds(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert largest_difference(request.getfixturevalue(model), "reference", monkeypatch) < 1e-4


@pytest.mark.exhaustive
def test_a_gpus_kernels_read_what_they_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They multiply in float16. In a second layer some keys would be rounded the other way for that.
    path = make_tiny_model("LlamaForCausalLM", tmp_path, num_hidden_layers=1)
    assert largest_difference(path, "cuda", monkeypatch) < 3e-3


def largest_difference(path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(uniproc, "current_platform", lambda _name: AsyncCpuPlatform(kernels))
    engine = TinyEngine(path, depth=2, block_size=16, kv_cache_dtype="fp8")
    prompts = make_prompts()
    requests = [make_request(f"r{n}", prompt, logprobs=0, max_tokens=8) for n, prompt in enumerate(prompts)]
    tokens = engine.generate(requests)
    oracle = load_oracle(path).float()
    differences: list[float] = []
    for number, prompt in enumerate(prompts):
        ours = [values[0] for entry in engine.news[f"r{number}"] for values in entry.logprob_values or []]
        theirs = oracle_logprobs(oracle, prompt, tokens[f"r{number}"])
        differences += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(differences)
