"""A draft model with another tokenizer changes no token, and is understood as far as both have a token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.oracles.tiny_models import make_tiny_model
from tests.spec_decode.test_draft_model import check, drafted_by, speculating
from tests.spec_decode.test_end_to_end import EDITS, PARAMS, make_engine
from tests.worker.tiny_engine import TinyEngine, make_request

from quire import LLM
from quire.errors import ConfigError

RUNNERS = ["host", "device"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def renumbered(path: Path, folder: Path, merges: int | None = None) -> Path:
    """The same model, whose tokenizer counts its tokens the other way round and perhaps has fewer merges."""
    shutil.copytree(path, folder)
    file = folder / "tokenizer.json"
    tokenizer: Any = json.loads(file.read_text())
    model = tokenizer["model"]
    config: Any = json.loads((folder / "config.json").read_text())
    last = config["vocab_size"] - 1
    if merges is not None:
        dropped = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"][merges:]]
        model["merges"] = model["merges"][:merges]
        model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in dropped}
    model["vocab"] = {token: last - number for token, number in model["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = last - added["id"]
    for special in (tokenizer.get("post_processor") or {}).get("special_tokens", {}).values():
        special["ids"] = [last - number for number in special["ids"]]
    file.write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_model_itself_under_other_numbers_is_right(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path, runner: str, temperature: float
) -> None:
    known = sorted(json.loads((llama / "tokenizer.json").read_text())["model"]["vocab"].values())
    settings = drafted_by(renumbered(llama, tmp_path / "other"))
    params = {
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 12,
        "allowed_token_ids": known,
    }  # others have no text
    prompts = [known[number : number + 20] for number in (20, 90, 150)]

    def run(**settings: Any) -> tuple[TinyEngine, Any]:
        engine = make_engine(monkeypatch, llama, runner, **settings)
        engine = engine if settings["speculative_config"] is None else speculating(engine)
        return engine, engine.generate([make_request(f"{at}", prompt, **params) for at, prompt in enumerate(prompts)])

    (_, expected), (engine, found) = run(speculative_config=None), run(**settings)
    counts = engine.scheduler._stats.drafts
    assert found == expected
    assert counts.num_accepted_tokens > 0.7 * counts.num_draft_tokens > 0


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("params", [[{}] * 6, PARAMS, EDITS], ids=["greedy", "sampled", "edited"])
def test_whatever_is_drafted_all_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path, runner: str, params: list[dict[str, Any]]
) -> None:
    check(monkeypatch, llama, renumbered(llama, tmp_path / "other", merges=10), runner, params)


def test_another_tokenizer_is_refused_where_it_was_turned_off(llama: Path, tmp_path: Path) -> None:
    drafter = {"model": str(renumbered(llama, tmp_path / "other")), "use_heterogeneous_vocab": False}
    with pytest.raises(ConfigError, match=r"is 383 there and 0 here.*use_heterogeneous_vocab is off"):
        LLM(str(llama), speculative_config=drafter)
