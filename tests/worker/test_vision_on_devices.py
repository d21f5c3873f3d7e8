"""Models that see on the runner of a device beside the host: encoders run before the step, embeddings join its graph."""

import pytest
from tests.models.test_parity_vision import PROMPTS, assert_sees
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.media_parity import COMMON
from tests.oracles.tiny_vision import VisionOracle, make_tiny_vision

from quire import LLM
from quire.executor import selector


@pytest.mark.parametrize("tokens", [9, 48])
@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_a_device_sees_what_transformers_sees(architecture, tokens, tmp_path, monkeypatch):
    path = make_tiny_vision(architecture, tmp_path)
    platform = AsyncCpuPlatform("reference")
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "async_scheduling": True}
    llm = LLM(model=str(path), **(COMMON | settings))
    oracle = VisionOracle(path)
    for order in (1, -1):
        assert_sees(llm, oracle, PROMPTS[::order], max_tokens=6)
    counts = platform.last_runtime.counts
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]
