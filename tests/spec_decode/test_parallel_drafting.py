"""Drafters that make all guesses at once, over tokens that stand for the unknown: what a plain computation of them guesses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.draft_heads import make_eagle3
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model
from tests.spec_decode.test_draft_heads import proposed
from tests.spec_decode.test_draft_model import check, drafted_by, speculating
from tests.spec_decode.test_end_to_end import EDITS, PARAMS, make_engine
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.errors import ConfigError

RUNNERS, MASK = ["host", "device"], 311


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that was trained with a token for the unknown, as far as its configuration is concerned."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("parallel"), **shape)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return path


def at_once(oracle: Any, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens + [MASK] * (count - 1)])).logits[0, -count:]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("tokens_a_step", [64, 16])
def test_a_draft_models_guesses_are_those_of_a_plain_computation(
    monkeypatch: pytest.MonkeyPatch, llama: Path, parallel: Path, runner: str, tokens_a_step: int
) -> None:
    prompt = [(7 + 31 * number) % VOCAB_SIZE for number in range(21)]
    settings = {"max_num_batched_tokens": tokens_a_step, **drafted_by(parallel, parallel_drafting=True)}
    engine = speculating(make_engine(monkeypatch, llama, runner, **settings))
    (tokens,) = engine.generate([make_request("r", prompt, max_tokens=10)]).values()
    guesses, oracle = proposed(engine, prompt, tokens), load_oracle(parallel)
    assert len(guesses) >= 4
    for count, guess in guesses:
        assert guess == at_once(oracle, (prompt + tokens)[:count], len(guess)), count


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("params", [[{}] * 6, PARAMS, EDITS], ids=["greedy", "sampled", "edited"])
def test_whatever_is_drafted_all_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, llama: Path, parallel: Path, runner: str, params: list[dict[str, Any]]
) -> None:
    check(monkeypatch, llama, parallel, runner, params, **drafted_by(parallel, parallel_drafting=True))


def test_what_was_not_trained_for_it_is_refused_with_what_is_missing(llama: Path, tmp_path: Path) -> None:
    make_eagle3(llama, tmp_path)
    head = tmp_path / "head"
    config = json.loads((head / "config.json").read_text())
    for given, why in (
        ({"method": "draft_model", "model": str(llama)}, "names no pard_token, ptd_token_id or mask_token_id"),
        ({"method": "eagle3", "model": str(head)}, "names no pard_token, ptd_token_id or mask_token_id"),
        ({"method": "eagle3", "model": str(head), "token": MASK}, "the head has no mask_hidden"),
        ({"method": "ngram"}, "method 'ngram' has none"),
    ):
        if (token := given.pop("token", None)) is not None:
            (head / "config.json").write_text(json.dumps(config | {"ptd_token_id": token}))
        with pytest.raises(ConfigError, match=why):
            TinyEngine(llama, speculative_config={**given, "parallel_drafting": True})
