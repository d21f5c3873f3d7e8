"""A draft model beside the model: tokens are those of an engine without it; one that is the model itself is always right."""

from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.spec_decode.test_end_to_end import EDITS, PARAMS, make_engine, requests_of, told
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.config.kv_spec import KVCacheConfig, group_layers
from quire.core.model_drafting import ModelDrafting
from quire.errors import ConfigError

RUNNERS = ["host", "device"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("smaller"), **shape)


def drafted_by(path: Path, tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "draft_model", "model": str(path), "num_speculative_tokens": tokens, "enable_adaptive_verification": False,
            **more,
        }
    }  # fmt: skip


def speculating(engine: TinyEngine) -> TinyEngine:
    assert engine.config.speculative is not None
    engine.scheduler.speculate(engine.config.speculative)
    return engine


def check(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    drafter: Path,
    runner: str,
    params: list[dict[str, Any]],
    **settings: Any,
) -> TinyEngine:
    plain = make_engine(monkeypatch, path, runner, **{"speculative_config": None} | settings)
    expected = told(plain, requests_of(params))
    engine = speculating(make_engine(monkeypatch, path, runner, **drafted_by(drafter) | settings))
    for one, other in zip(told(engine, requests_of(params)), expected, strict=True):
        assert one[:4] == other[:4]
        assert one[4].expected == other[4]
    assert engine.scheduler._stats.drafts.num_draft_tokens > 0
    return engine


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("params", [[{}] * 6, PARAMS, EDITS], ids=["greedy", "sampled", "edited"])
def test_whatever_is_drafted_all_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, llama: Path, smaller: Path, runner: str, params: list[dict[str, Any]]
) -> None:
    check(monkeypatch, llama, smaller, runner, params)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_drafter_that_is_the_model_itself_is_right_greedy_and_sampled(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str, temperature: float
) -> None:
    engine = check(monkeypatch, llama, llama, runner, [{"temperature": temperature, "seed": 3}] * 6)
    counts = engine.scheduler._stats.drafts
    assert counts.num_accepted_tokens > 0.98 * counts.num_draft_tokens


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 16},
        {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "swap_space": 0.01},
        {"deterministic": True},
        {"block_size": 4, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_it_follows_through_chunks_preemption_swapping_and_plain_steps(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str, settings: dict[str, Any]
) -> None:
    if runner == "device" and "swap_space" in settings:
        pytest.skip("swapping is the host runner's here")
    counts = check(monkeypatch, llama, llama, runner, PARAMS[:3], **settings).scheduler._stats.drafts
    assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens  # top-k is the model's alone


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "model", ["Gemma3ForCausalLM", "MistralForCausalLM", "DeepseekV2ForCausalLM", "GPT2LMHeadModel"]
)
def test_pages_of_any_kind_hold_the_drafters_layers_beside_the_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smaller: Path, runner: str, model: str
) -> None:
    path = make_tiny_model(model, tmp_path, **({"sliding_window": 8} if "Mistral" in model else {}))
    check(monkeypatch, path, smaller, runner, PARAMS[:3])


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_it_has_read_of_a_cached_prefix_it_does_not_read_again_and_what_it_has_not_it_does(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str
) -> None:
    engine = speculating(make_engine(monkeypatch, llama, runner, **drafted_by(llama)))
    drafting = engine.scheduler.drafting
    assert isinstance(drafting, ModelDrafting)
    prompt = [5 + 7 * number % 300 for number in range(49)]
    drafting._times.is_paused = True
    (expected,) = engine.generate([make_request("unread", prompt)]).values()
    assert not engine.scheduler._stats.drafts.num_draft_tokens
    drafting._times.is_paused = False
    for name in ("reads it all", "reads the rest"):
        assert list(engine.generate([make_request(name, prompt)]).values()) == [expected]
    counts = engine.scheduler._stats.drafts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0
    assert engine.scheduler.kv.num_hits >= 2 * 48


def test_pages_are_shared_in_one_table_where_the_model_needs_one_alone(
    monkeypatch: pytest.MonkeyPatch, llama: Path, smaller: Path
) -> None:
    engine = make_engine(monkeypatch, llama, "host", **drafted_by(smaller))
    specs = engine.executor.kv_cache_specs()
    kv_cache = KVCacheConfig(0, group_layers(specs))
    assert len(kv_cache.groups) == 1 and len(specs) == 5
    assert kv_cache.page_bytes == sum(spec.page_bytes for spec in specs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "needs one"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5}, "accepts by what is drawn"),
        ({"draft_tensor_parallel_size": 3}, "every rank has the whole drafter"),
    ],
)
def test_what_cannot_be_is_refused_in_words(llama: Path, smaller: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TinyEngine(llama, **drafted_by(smaller, **change))
