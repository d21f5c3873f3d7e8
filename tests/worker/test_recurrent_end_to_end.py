"""Models with states behind the scheduler: tokens equal Transformers', and every room sees the same page size."""

from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.config.kv_spec import STATE_BLOCK_SIZE, KVKind
from quire.platforms import current_platform
from quire.worker.dry_run import explain_without_weights

MODELS = {"hybrid": "BambaForCausalLM", "convolutions": "Lfm2ForCausalLM", "states only": "MambaForCausalLM"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by name."""
    return {name: make_tiny_model(kind, tmp_path_factory.mktemp("tiny")) for name, kind in MODELS.items()}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_equal_transformers_in_chunks_and_from_the_cache(
    paths: dict[str, Path], model: str, block_size: int | None, depth: int
) -> None:
    prompts = make_prompts()
    expected = greedy_oracle(paths[model], prompts)
    engine = TinyEngine(
        paths[model], depth=depth, block_size=block_size, max_num_batched_tokens=16, kv_cache_memory_bytes=64 << 20
    )
    assert run(engine, greedy_requests(prompts)) == expected
    again = [make_request(f"again{index}", prompt) for index, prompt in enumerate(prompts)]
    assert run(engine, again) == expected
    if block_size == 4:
        assert [engine.news[request.request_id][0].num_cached_tokens for request in again] == [
            (len(prompt) - 1) // 4 * 4 for prompt in prompts
        ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_greedy_tokens_survive_preemption(paths: dict[str, Path], mode: str) -> None:
    prompts = make_prompts((9, 12, 7, 11))
    settings: dict[str, Any] = {"swap_space": 0.01} if mode == "swap" else {}
    engine = TinyEngine(
        paths["hybrid"], depth=2, preemption_mode=mode, num_gpu_blocks_override=24, max_model_len=28,
        max_num_batched_tokens=8, enable_prefix_caching=False, **settings,
    )  # fmt: skip
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(paths["hybrid"], prompts)
    assert engine.scheduler.stats().num_preemptions > 0


def test_pages_of_a_hybrid_are_as_long_as_a_state_asks_for(paths: dict[str, Path]) -> None:
    engine = TinyEngine(paths["hybrid"], block_size=None, kv_cache_memory_bytes=64 << 20)
    specs = engine.executor.kv_cache_specs()
    state = max(spec.page_bytes for spec in specs if spec.kind is KVKind.RECURRENT)
    attention = [spec for spec in specs if spec.kind is KVKind.FULL]
    size = specs[0].block_size
    assert size % 16 == 0 and size > 16
    assert all(spec.page_bytes >= state > spec.bytes_per_token * (size - 16) for spec in attention)
    assert engine.scheduler.kv.block_size == size == engine.scheduler._batch.tail.shape[1]
    numbers = explain_without_weights(engine.config, current_platform())["model"]
    assert numbers["block_size"] == size and f"{size} tokens of attention" in numbers["block_size_reason"]


def test_pages_of_states_alone_have_a_fixed_length(paths: dict[str, Path]) -> None:
    engine = TinyEngine(paths["states only"], block_size=None, kv_cache_memory_bytes=64 << 20)
    assert {spec.block_size for spec in engine.executor.kv_cache_specs()} == {STATE_BLOCK_SIZE}


def test_a_size_that_the_user_named_stands_and_is_padded(paths: dict[str, Path]) -> None:
    engine = TinyEngine(paths["hybrid"], block_size=16, kv_cache_memory_bytes=64 << 20)
    assert engine.scheduler.kv.block_size == 16
    numbers = explain_without_weights(engine.config, current_platform())["model"]
    assert numbers["block_size"] == 16 and "are padded" in numbers["block_size_reason"]
