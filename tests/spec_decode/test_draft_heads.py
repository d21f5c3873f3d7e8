"""Heads over the model's features guess what a plain computation of them guesses, and change no token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.draft_heads import FAMILIES, Head, make_eagle, make_eagle3, make_mtp, make_peagle
from tests.oracles.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.spec_decode.test_draft_model import speculating
from tests.spec_decode.test_end_to_end import EDITS, PARAMS, make_engine, requests_of, told
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError

Made = tuple[Path, dict[str, Any], Head]
RUNNERS = ["host", "device"]
KINDS = ["eagle", "eagle3", "peagle", *FAMILIES]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A model, the keys that name its head, and the head."""
    made: dict[str, Made] = {}

    def build(kind: str) -> Made:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            keys: dict[str, Any] = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
            if kind in FAMILIES:
                head = make_mtp(kind, folder)
                made[kind] = (folder, keys | {"method": "mtp"}, head)
            else:
                path = make_tiny_model("LlamaForCausalLM", folder / "model")
                head = {"eagle": make_eagle, "eagle3": make_eagle3, "peagle": make_peagle}[kind](path, folder)
                keys |= {"method": "eagle3", "parallel_drafting": True} if kind == "peagle" else {"method": kind}
                made[kind] = (path, keys | {"model": str(folder / "head")}, head)
        return made[kind]

    return build


def proposed(engine: TinyEngine, prompt: list[int], tokens: list[int]) -> list[tuple[int, list[int]]]:
    """How many tokens there were when each guess was made, and the guess."""
    count, found = len(prompt), []
    for output in engine.raw:
        for row in output.rows.tolist():
            count += 1 + len(output.accepted.get(row, ()))
            if row in output.proposals:
                found.append((count, output.proposals[row]))
    return [(count, guess) for count, guess in found if count <= len(prompt) + len(tokens)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_a_plain_computation(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Made], kind: str, runner: str
) -> None:
    path, keys, head = make(kind)
    prompt = [(7 + 31 * number) % VOCAB_SIZE for number in range(21)]
    for tokens_a_step in (64, 16):  # a whole prompt, and one in chunks
        settings = {"max_num_batched_tokens": tokens_a_step, "speculative_config": keys}
        engine = speculating(make_engine(monkeypatch, path, runner, **settings))
        (tokens,) = engine.generate([make_request("r", prompt, max_tokens=10)]).values()
        guesses = proposed(engine, prompt, tokens)
        assert len(guesses) >= 4
        for count, guess in guesses:
            assert guess == head.guesses((prompt + tokens)[:count], len(guess)), count


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize("params", [PARAMS, EDITS], ids=["sampled", "edited"])
def test_all_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Made], kind: str, runner: str, params: list[dict[str, Any]]
) -> None:
    path, keys, _ = make(kind)
    plain = make_engine(monkeypatch, path, runner, speculative_config=None, max_num_batched_tokens=24)
    expected = told(plain, requests_of(params))
    settings = {"speculative_config": keys, "max_num_batched_tokens": 24}
    engine = speculating(make_engine(monkeypatch, path, runner, **settings))
    for one, other in zip(told(engine, requests_of(params)), expected, strict=True):
        assert one[:4] == other[:4]
        assert one[4].expected == other[4]
    assert engine.scheduler._stats.drafts.num_draft_tokens > 0


def test_a_row_whose_prefix_it_has_not_read_gets_no_guesses(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Made]
) -> None:
    path, keys, _ = make("eagle3")
    engine = speculating(make_engine(monkeypatch, path, "host", speculative_config=keys))
    prompt = [5 + 7 * number % 300 for number in range(49)]
    engine.scheduler.drafting._times.is_paused = True  # type: ignore[attr-defined]
    engine.generate([make_request("unread", prompt)])
    engine.scheduler.drafting._times.is_paused = False  # type: ignore[attr-defined]
    engine.raw.clear()
    engine.generate([make_request("found", prompt)])
    assert not any(output.proposals for output in engine.raw)
    engine.generate([make_request("its own", prompt[1:])])
    assert any(output.proposals for output in engine.raw)


def test_a_model_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="no layers for further tokens are known of LlamaForCausalLM"):
        TinyEngine(path, speculative_config={"method": "mtp"})


def test_older_names_of_these_layers_mean_the_same(tmp_path: Path) -> None:
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    config = EngineArgs(model=str(path), speculative_config={"method": "deepseek_mtp"}).create_engine_config()
    assert config.speculative is not None and config.speculative.method == "mtp"
