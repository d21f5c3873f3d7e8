"""Layers with states on the runner of a device that works beside the host: graphs at rounded sizes, two steps in flight."""

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run


@pytest.mark.parametrize("architecture", ["MambaForCausalLM", "BambaForCausalLM"])
def test_greedy_tokens_equal_transformers(architecture, tmp_path, monkeypatch):
    path, prompts = make_tiny_model(architecture, tmp_path), make_prompts()
    engine = make_engine(monkeypatch, path, max_num_batched_tokens=32)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    counts = engine.platform.last_runtime.counts  # type: ignore[attr-defined]
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]
