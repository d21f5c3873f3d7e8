"""Models that see on the runner of a device beside the host: encoders run beside the steps, embeddings join their graphs."""

import pytest
import torch
from tests.models.test_parity_vision import PROMPTS, assert_sees
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.media_parity import COMMON
from tests.oracles.tiny_vision import VisionOracle, make_tiny_vision

from quire import LLM, SamplingParams
from quire.core import encoding
from quire.executor import selector
from quire.media import MediaItem
from quire.worker.item_encoder import ItemEncoder


@pytest.mark.parametrize("tokens", [9, 48])
@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_a_device_sees_what_transformers_sees(architecture, tokens, tmp_path, monkeypatch):
    path = make_tiny_vision(architecture, tmp_path)
    platform = AsyncCpuPlatform("reference")
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    monkeypatch.setattr(encoding, "MOST_WITHIN", 0)
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "async_scheduling": True}
    llm, beside = LLM(model=str(path), **(COMMON | settings)), list[str]()
    compute = ItemEncoder._compute_beside
    monkeypatch.setattr(
        ItemEncoder, "_compute_beside", lambda encoder, keys: (beside.extend(keys), compute(encoder, keys))
    )
    oracle = VisionOracle(path)
    llm.enqueue({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=80, ignore_eos=True))
    for _ in range(4):
        llm.llm_engine.step()  # somebody decodes
    for order in (1, -1):
        assert_sees(llm, oracle, PROMPTS[::order], max_tokens=6)
    assert platform.last_runtime is not None
    counts = platform.last_runtime.counts
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]
    assert beside, "nothing was encoded while others decoded"


def test_what_cannot_be_encoded_beside_the_steps_is_encoded_by_the_step_that_needs_it(tmp_path, monkeypatch):
    path = make_tiny_vision("LlavaForConditionalGeneration", tmp_path)
    monkeypatch.setattr(selector, "current_platform", lambda _name: AsyncCpuPlatform("reference"))
    llm = LLM(model=str(path), **(COMMON | {"max_num_batched_tokens": 48, "max_num_seqs": 4, "async_scheduling": True}))
    encode, failed = ItemEncoder._encode, list[str]()

    def fail_once(encoder: ItemEncoder, items: list[MediaItem]) -> dict[str, torch.Tensor]:
        new = [item.key for item in items if item.key not in failed]
        failed.extend(new)
        if new:
            raise torch.OutOfMemoryError("the device has no memory left")
        return encode(encoder, items)

    monkeypatch.setattr(ItemEncoder, "_encode", fail_once)
    assert_sees(llm, VisionOracle(path), PROMPTS, max_tokens=6)
    assert failed
