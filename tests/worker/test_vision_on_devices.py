"""Models that see on the runner of a device beside the host: encoders run before the step, embeddings join its graph."""

import pytest
from tests.models.test_parity_vision import COMMON, IMAGES, PROMPTS, assert_parity
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_vision import IMAGE, VisionOracle, make_tiny_vision

from quire import LLM, SamplingParams
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
    params = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        allowed_token_ids=list(range(IMAGE)),
    )
    for order in (1, -1):
        requests = [
            {"prompt_token_ids": ids, "multi_modal_data": {"image": [IMAGES[name] for name in names]}}
            for ids, names in PROMPTS[::order]
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        for (_, names), output in zip(PROMPTS[::order], outputs, strict=True):
            assert_parity(oracle, [IMAGES[name] for name in names], output)
    counts = platform.last_runtime.counts
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]
