"""Medusa and the MLP speculator guess what a plain computation guesses, and change no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model
from tests.spec_decode.test_combinations import tokens_of
from tests.spec_decode.test_draft_heads import proposed
from tests.spec_decode.test_draft_model import speculating
from tests.spec_decode.test_end_to_end import EDITS, PARAMS, make_engine, requests_of, told
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.errors import ConfigError

HEADS = 3
Logits = Callable[[int, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 * shape[-1] ** -0.5


def write(folder: Path, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(fields))


def medusa(folder: Path, hidden: int, *, kind: str) -> Logits:
    """`published`: the authors' names and a bias. `truncated`: other names, two layers, and some of the tokens."""
    known = torch.arange(0, VOCAB_SIZE, 2) if kind == "truncated" else torch.arange(VOCAB_SIZE)
    layers = 2 if kind == "truncated" else 1
    fields: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": VOCAB_SIZE,
    }
    weights: dict[str, torch.Tensor] = {}
    w: dict[tuple[int, int], torch.Tensor] = {
        (head, layer): random(hidden, hidden, seed=10 * head + layer)
        for head in range(HEADS)
        for layer in range(layers)
    }
    bias = {
        head: random(hidden, seed=50 + head) if kind == "published" else torch.zeros(hidden) for head in range(HEADS)
    }
    last = {head: random(len(known), hidden, seed=90 + head) for head in range(HEADS)}
    if kind == "published":
        fields |= {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "medusa_fc_bias": True}
        for head in range(HEADS):
            weights |= {
                f"{head}.0.linear.weight": w[head, 0],
                f"{head}.0.linear.bias": bias[head],
                f"{head}.1.weight": last[head],
            }
    else:
        fields |= {"num_heads": HEADS, "num_hidden_layers": layers, "truncated_vocab_size": len(known)}
        for (head, layer), value in w.items():
            weights[f"medusa_heads.blocks.{head}.layers.{layer}.weight"] = value
        weights |= {f"medusa_heads.lm_heads.{head}.weight": value for head, value in last.items()}
        weights["medusa_heads.token_map"] = known
    write(folder, fields, weights)

    def logits(number: int, state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = state
        for layer in range(layers):
            x = x + torch.nn.functional.silu(w[number, layer] @ x + bias[number])
        spread = torch.full((VOCAB_SIZE,), float("-inf"))
        spread[known] = last[number] @ x
        return spread, state

    return logits


def mlp(folder: Path, hidden: int, *, tied: bool) -> Logits:
    inner, count = 24, 1 if tied else HEADS
    fields = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": hidden, "inner_dim": inner,
        "n_predict": HEADS, "vocab_size": VOCAB_SIZE, "tie_weights": tied, "scale_input": tied,
    }  # fmt: skip
    emb = [random(VOCAB_SIZE, inner, seed=number) for number in range(count)]
    head = [random(VOCAB_SIZE, inner, seed=20 + number) for number in range(count)]
    scale = [1 + 0.1 * random(inner, seed=30 + number) for number in range(count)]
    shift = [random(inner, seed=40 + number) for number in range(count)]
    proj = [random(inner, inner if number else hidden, seed=50 + number) for number in range(2 if tied else HEADS)]
    names = {"emb": emb, "head": head, "proj": proj}
    weights = {
        f"speculator.{name}.{number}.weight": value
        for name, values in names.items()
        for number, value in enumerate(values)
    }
    weights |= {f"speculator.ln.{number}.weight": value for number, value in enumerate(scale)}
    weights |= {f"speculator.ln.{number}.bias": value for number, value in enumerate(shift)}
    write(folder, fields, weights)
    state_weight = 0.5 ** (0.5 / HEADS)
    emb_weight = ((1 - state_weight**2) * (inner / 2)) ** 0.5

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    def logits(number: int, state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = 0 if tied else number
        x = norm(state) / 2**0.5 if tied and number == 0 else state
        x = proj[min(number, len(proj) - 1)] @ x + emb[place][token] * (emb_weight / state_weight)
        state = torch.nn.functional.gelu(norm(x) * scale[place] + shift[place])
        return head[place] @ state, state

    return logits


KINDS: dict[str, Callable[[Path, int], Logits]] = {
    "medusa published": lambda folder, hidden: medusa(folder, hidden, kind="published"),
    "medusa truncated": lambda folder, hidden: medusa(folder, hidden, kind="truncated"),
    "mlp_speculator": lambda folder, hidden: mlp(folder, hidden, tied=False),
    "mlp_speculator tied": lambda folder, hidden: mlp(folder, hidden, tied=True),
}


def keys(kind: str, folder: Path, tokens: int = HEADS) -> dict[str, Any]:
    method = kind.split()[0]
    chosen = {"method": method, "model": str(folder), "num_speculative_tokens": tokens}
    return {"speculative_config": chosen | {"enable_adaptive_verification": False}}


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_a_plain_computation(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path, kind: str, runner: str
) -> None:
    target = load_oracle(llama)
    logits = KINDS[kind](tmp_path / "heads", target.config.hidden_size)
    engine = speculating(
        make_engine(monkeypatch, llama, runner, max_num_batched_tokens=16, **keys(kind, tmp_path / "heads"))
    )
    prompt = [(7 + 31 * number) % VOCAB_SIZE for number in range(21)]
    (tokens,) = engine.generate([make_request("r", prompt, max_tokens=10)]).values()
    guesses = proposed(engine, prompt, tokens)
    assert len(guesses) >= 4
    for count, guess in guesses:
        known = (prompt + tokens)[:count]
        with torch.no_grad():
            state = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
        token = known[-1]
        for number, guessed in enumerate(guess):
            values, state = logits(number, state, token)
            token = int(values.argmax())
            assert guessed == token, (count, number)


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("params", [PARAMS, EDITS], ids=["sampled", "edited"])
def test_all_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path, runner: str, params: list[dict[str, Any]]
) -> None:
    mlp(tmp_path / "heads", load_oracle(llama).config.hidden_size, tied=True)
    expected = told(make_engine(monkeypatch, llama, runner, speculative_config=None), requests_of(params))
    engine = speculating(make_engine(monkeypatch, llama, runner, **keys("mlp_speculator", tmp_path / "heads")))
    for one, other in zip(told(engine, requests_of(params)), expected, strict=True):
        assert one[:4] == other[:4]
        assert one[4].expected == other[4]
    assert engine.scheduler._stats.drafts.num_draft_tokens > 0


def test_what_does_not_fit_is_refused_in_words(llama: Path, tmp_path: Path) -> None:
    hidden = load_oracle(llama).config.hidden_size
    medusa(tmp_path / "good", hidden, kind="published")
    with pytest.raises(ConfigError, match="has 3 heads, and each makes one guess; give at most 3"):
        TinyEngine(llama, **keys("medusa", tmp_path / "good", 4))
    medusa(tmp_path / "wide", hidden + 8, kind="published")
    with pytest.raises(ConfigError, match=f"its hidden size is {hidden + 8}, and the model's {hidden}"):
        TinyEngine(llama, **keys("medusa", tmp_path / "wide"))
    mlp(tmp_path / "other", hidden, tied=False)
    with pytest.raises(ConfigError, match=r"are missing and .* are not known"):
        fields = json.loads((tmp_path / "other" / "config.json").read_text()) | {"n_predict": 4}
        (tmp_path / "other" / "config.json").write_text(json.dumps(fields))
        TinyEngine(llama, **keys("mlp_speculator", tmp_path / "other"))


def test_two_ranks_guess_the_same(llama: Path, tmp_path: Path) -> None:
    medusa(tmp_path / "heads", load_oracle(llama).config.hidden_size, kind="published")
    settings = keys("medusa", tmp_path / "heads")
    expected, one = tokens_of(llama, [None], **settings)
    tokens, two = tokens_of(llama, [None], tensor_parallel_size=2, **settings)
    assert tokens == expected
    assert two.num_draft_tokens == one.num_draft_tokens > 0
    assert two.accepted_per_position == one.accepted_per_position
