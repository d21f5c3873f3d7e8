"""A drafter that draws with noise of its own: the model's distribution, and more guesses accepted than with the model's noise."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from tests.oracles.draft_heads import make_eagle3
from tests.oracles.tiny_models import make_tiny_model
from tests.spec_decode.test_draft_model import drafted_by, speculating
from tests.spec_decode.test_end_to_end import make_engine
from tests.worker.tiny_engine import TinyEngine, make_request

ROWS, BATCHES, TOKENS, VOCAB = 64, 8, 4, 8
FILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 5}
ROOM: dict[str, Any] = {"max_num_seqs": ROWS, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 32 << 20}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("smaller"), **shape)


def streams(engine: TinyEngine, first_seed: int, params: dict[str, Any], batches: int = BATCHES) -> list[Any]:
    """What comes behind the first token of answers to one prompt, with many seeds."""
    found: list[Any] = []
    for number in range(batches):
        seeds = range(first_seed + number * ROWS, first_seed + (number + 1) * ROWS)
        requests = [make_request(f"r{seed}", [5, 6, 7], seed=seed, max_tokens=TOKENS, **params) for seed in seeds]
        found += [tuple(tokens[1:]) for tokens in engine.generate(requests).values()]
    return found


def p_value(one: list[Any], other: list[Any]) -> float:
    """That two lists of answers are of one distribution; rare ones are counted together."""
    counts = [Counter(one), Counter(other)]
    often = [answer for answer in counts[0] | counts[1] if sum(count[answer] for count in counts) >= 16]
    table = [
        [*(count[answer] for answer in often), sum(n for answer, n in count.items() if answer not in often)]
        for count in counts
    ]
    return float(stats.chi2_contingency([row if any(r[-1] for r in table) else row[:-1] for row in table]).pvalue)


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_tokens_follow_the_models_distribution(
    monkeypatch: pytest.MonkeyPatch, llama: Path, smaller: Path, tmp_path: Path, runner: str, kind: str
) -> None:
    settings = drafted_by(smaller, 2, draft_sample_method="probabilistic")
    if kind == "eagle3":
        make_eagle3(llama, tmp_path, vocab=6)
        settings["speculative_config"] |= {"method": kind, "model": str(tmp_path / "head")}
    plain = make_engine(monkeypatch, llama, runner, speculative_config=None, **ROOM)
    engine = speculating(make_engine(monkeypatch, llama, runner, **settings, **ROOM))
    expected, found = streams(plain, 0, FILTERED), streams(engine, 10**6, FILTERED)
    assert p_value(expected, found) > 1e-3
    counts = engine.scheduler._stats.drafts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens and counts.accepted_per_position[1] > 0


def test_more_guesses_are_accepted_than_with_the_models_noise(llama: Path, smaller: Path) -> None:
    shares: list[float] = []
    for method in ("greedy", None, "probabilistic"):
        keys = {} if method is None else {"draft_sample_method": method}
        engine = speculating(TinyEngine(llama, **drafted_by(smaller, 1, **keys), **ROOM))
        streams(engine, 0, {"temperature": 1.0}, batches=6)
        counts = engine.scheduler._stats.drafts
        shares.append(counts.num_accepted_tokens / counts.num_draft_tokens)
    greedy, shared, own = shares
    assert own > shared and own > greedy


def test_the_test_would_notice_another_temperature(llama: Path) -> None:
    engine = TinyEngine(llama, **ROOM)
    assert p_value(streams(engine, 0, FILTERED), streams(engine, 10**6, FILTERED | {"temperature": 0.6})) < 1e-3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_greedy_requests_keep_their_tokens(llama: Path, smaller: Path, method: str) -> None:
    requests = [make_request(f"r{number}", [5, 6, 1 + number]) for number in range(6)]
    engine = speculating(TinyEngine(llama, **drafted_by(smaller, draft_sample_method=method)))
    assert engine.generate(requests) == TinyEngine(llama).generate(requests)
