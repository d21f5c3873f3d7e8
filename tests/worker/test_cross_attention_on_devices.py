"""Models with an encoder beside their decoder on the runner of a device beside the host: graphs gather what is read."""

import pytest
from tests.models.test_parity_encoder_decoder import COMMON, REQUESTS, assert_continues
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_encoder_decoder import EncoderDecoderOracle, make_tiny_encoder_decoder

from quire import LLM
from quire.executor import selector


@pytest.mark.parametrize("tokens", [8, 64])
def test_a_device_hears_what_transformers_hears(tokens, tmp_path, monkeypatch):
    architecture = "WhisperForConditionalGeneration"
    path = make_tiny_encoder_decoder(architecture, tmp_path)
    platform = AsyncCpuPlatform("reference")
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "async_scheduling": True}
    llm = LLM(model=str(path), **(COMMON | settings))
    oracle = EncoderDecoderOracle(path)
    for order in (1, -1):
        assert_continues(llm, oracle, architecture, REQUESTS[::order])
    counts = platform.last_runtime.counts
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]
