"""Drafters with ranks, adapters, sleep and new weights; and with fewer tokens than the model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.oracles.draft_heads import make_eagle3
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.spec_decode.test_combinations import tokens_of
from tests.spec_decode.test_draft_model import drafted_by, speculating
from tests.worker.tiny_engine import TinyEngine, make_request

from quire import LLM, SamplingParams
from quire.distributed.weight_transfer import shared_weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def eagle3(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("head")
    make_eagle3(llama, folder)
    keys = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    return {"speculative_config": keys | {"method": "eagle3", "model": str(folder / "head")}}


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_two_ranks_draft_the_same(llama: Path, eagle3: dict[str, Any], kind: str) -> None:
    settings = eagle3 if kind == "eagle3" else drafted_by(llama)
    expected, one = tokens_of(llama, [None], **settings)
    tokens, two = tokens_of(llama, [None], tensor_parallel_size=2, **settings)
    assert tokens == expected
    assert two.accepted_per_position == one.accepted_per_position
    assert two.num_draft_tokens > 0


def test_rows_with_adapters_are_drafted_for_by_the_base(llama: Path, eagle3: dict[str, Any], tmp_path: Path) -> None:
    every = make_adapter(llama, tmp_path / "all", 1, r=8, lora_alpha=16, target_modules="all-linear")
    expected, _ = tokens_of(llama, [None, every], enable_lora=True)
    for settings in (eagle3, drafted_by(llama)):
        tokens, stats = tokens_of(llama, [None, every], enable_lora=True, **settings)
        assert tokens == expected
        assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_drafter_sleeps_and_wakes_with_its_model(llama: Path, eagle3: dict[str, Any], level: int) -> None:
    llm = LLM(str(llama), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, **eagle3)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def run() -> tuple[list[int], list[int]]:
        before = list(llm.call("stats").accepted_per_position)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8] * 5}], params, use_tqdm=False)
        after = llm.call("stats").accepted_per_position
        return list(output.outputs[0].token_ids), [
            b - a for a, b in zip(before or [0] * len(after), after, strict=True)
        ]

    first = run()
    llm.sleep(level)
    llm.wake_up()
    assert run() == first


def test_new_weights_of_the_model_are_those_that_a_head_borrows(
    llama: Path, eagle3: dict[str, Any], tmp_path: Path
) -> None:
    other = make_tiny_model("LlamaForCausalLM", tmp_path / "other", seed=9)
    llm = LLM(str(llama), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, **eagle3)
    fresh = LLM(str(other), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, **eagle3)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm.reload_weights(str(other))
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 5}]
    answers = [list(one.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids) for one in (llm, fresh)]
    assert answers[0] == answers[1]
    assert llm.call("stats").accepted_per_position == fresh.call("stats").accepted_per_position


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_weights_that_a_trainer_sends_are_those_of_an_engine_that_began_with_them(
    llama: Path, eagle3: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """A draft model keeps its own weights, and a head borrows the new ones; both stay in step with the model's pages."""
    other = make_tiny_model("LlamaForCausalLM", tmp_path / "other", seed=9)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 24}
    settings |= eagle3 if kind == "eagle3" else drafted_by(llama)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 5}]

    def told(llm: LLM) -> tuple[list[int], list[int]]:
        before = list(llm.call("stats").accepted_per_position)
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        after = llm.call("stats").accepted_per_position
        return list(output.outputs[0].token_ids), [
            b - a for a, b in zip(before or [0] * len(after), after, strict=True)
        ]

    llm = LLM(str(llama), **settings)
    first = told(llm)
    tensors = {name: tensor for file in other.glob("*.safetensors") for name, tensor in load_file(file).items()}
    llm.start_weight_update()
    with shared_weights(tensors) as info:
        llm.update_weights({"update_info": info})
    llm.finish_weight_update()
    updated = told(llm)
    assert updated == told(LLM(str(other), **settings))
    assert updated[0] != first[0]


@pytest.mark.parametrize("count", [VOCAB_SIZE - 84, VOCAB_SIZE + 64])
def test_a_draft_model_may_have_some_rows_of_its_embedding_less_or_more(
    llama: Path, tmp_path: Path, count: int
) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path, vocab_size=count)
    shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
    prompt = [VOCAB_SIZE - 1 - 3 * number for number in range(30)]
    (expected,) = TinyEngine(llama).generate([make_request("r", prompt)]).values()
    engine = speculating(TinyEngine(llama, **drafted_by(path)))
    assert list(engine.generate([make_request("r", prompt)]).values()) == [expected]
    assert engine.scheduler._stats.drafts.num_draft_tokens > 0


def test_explain_names_the_drafter_and_its_memory(llama: Path, eagle3: dict[str, Any]) -> None:
    report = TinyEngine(llama, **eagle3).executor.explain()
    drafter = report["drafter"] if "drafter" in report else report["worker"]["drafter"]
    assert drafter["method"] == "eagle3" and drafter["kv_layers"] == 1
    assert drafter["model"]["weight_bytes"] > 0
