"""Speculation with models: tokens, logprobs and ends are those of an engine without it, on both runners."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.config.speculative import SpeculativeConfig
from quire.core.drafting import Drafting
from quire.core.request_state import Request
from quire.executor import selector
from quire.request import EngineRequest
from quire.sampling_params import Thinking

MAX_TOKENS = 24
LENGTHS = (5, 30, 61, 17, 1, 44, 9)
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 7, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01, "seed": 9},
    {"temperature": 0.8, "logprobs": 3, "seed": 5},
    {"temperature": 0.6, "presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "seed": 2},
]
EDITS: list[dict[str, Any]] = [
    {"logit_bias": {5: 4.0, 9: -3.0}, "temperature": 0.9, "seed": 4},
    {"allowed_token_ids": list(range(10, 40)), "logprobs": 2},
    {"bad_words_token_ids": [[7], [8, 9], [11, 12, 13]], "temperature": 1.5, "seed": 8},
    {"min_tokens": 15, "eos_token_ids": [4, 5, 6], "ignore_eos": False, "temperature": 1.2, "seed": 6},
    {"repetition_penalty": 1.5, "logprobs": 0},
    {"prompt_logprobs": 1, "temperature": 0.5, "seed": 7},
    {"thinking": Thinking([3, 4]), "thinking_token_budget": 5, "temperature": 1.0, "seed": 10},
]


class Guesser:
    """Guesses the tokens that another run gave, some of them wrong."""

    def __init__(self, stream: list[int], num_prompt_tokens: int, rng: random.Random) -> None:
        self._stream, self._count, self._rng = stream, -num_prompt_tokens, rng

    def extend(self, token_ids: list[int]) -> None:
        self._count += len(token_ids)

    def propose(self, most: int) -> list[int]:
        guess = self._stream[self._count : self._count + self._rng.randint(1, most)]
        return [token if self._rng.random() < 0.8 else (token + 1) % VOCAB_SIZE for token in guess]


def requests_of(params: list[dict[str, Any]]) -> list[EngineRequest]:
    rng = random.Random(0)
    return [
        make_request(
            f"r{index}", [rng.randrange(3, VOCAB_SIZE) for _ in range(length)], **{"max_tokens": MAX_TOKENS} | chosen
        )
        for index, (length, chosen) in enumerate(zip(LENGTHS, params, strict=False))
    ]


def speculate(engine: TinyEngine, streams: dict[str, list[int]]) -> None:
    """Have the engine guess from these streams, and verify all guesses."""
    rng = random.Random(1)
    engine.scheduler.speculate(SpeculativeConfig(num_speculative_tokens=5, enable_adaptive_verification=False))
    assert isinstance(engine.scheduler.drafting, Drafting)

    def make(request: Request) -> Guesser:
        return Guesser(streams[request.request_id], request.num_prompt_tokens, rng)

    engine.scheduler.drafting._make_proposer = make


def make_engine(monkeypatch: pytest.MonkeyPatch, path: Path, runner: str, **settings: Any) -> TinyEngine:
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}
    if runner == "host":
        return TinyEngine(path, **{"block_size": 16} | speculative | settings)
    platform = AsyncCpuPlatform("reference" if runner == "device" else "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(selector, "current_platform", lambda _name: platform)
        return TinyEngine(path, **{"depth": 2, "block_size": 16} | speculative | settings)


def told(engine: TinyEngine, requests: list[EngineRequest]) -> list[Any]:
    """All that a request's outputs tell: tokens, ends, and ids, values and ranks of logprobs."""
    tokens = engine.generate(requests)
    found = []
    for request in requests:
        news = engine.news[request.request_id]
        ends = [(output.finish_reason, output.stop_reason) for output in news if output.finish_reason is not None]
        both = (one for output in news for one in (output.prompt_logprobs, output.logprobs))
        told = [one for one in both if one is not None]
        ids = [ids for one in told for ids in one.token_ids]
        values = [value for one in told for values in one.logprobs for value in values]
        ranks = [rank for one in told for rank in one.ranks]
        found.append((tokens[request.request_id], ends, ids, ranks, pytest.approx(values, abs=1e-4)))
    return found


def check(
    monkeypatch: pytest.MonkeyPatch, path: Path, runner: str, params: list[dict[str, Any]], **settings: Any
) -> None:
    plain = make_engine(monkeypatch, path, runner, **{"speculative_config": None} | settings)
    expected = told(plain, requests_of(params))
    engine = make_engine(monkeypatch, path, runner, **settings)
    speculate(engine, {f"r{index}": told_of[0] for index, told_of in enumerate(expected)})
    for one, other in zip(told(engine, requests_of(params)), expected, strict=True):
        assert one[:4] == other[:4]
        assert one[4].expected == other[4]
    counts = engine.scheduler._stats.drafts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert len(engine.steps) < len(plain.steps)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("params", [[{}] * 6, PARAMS, EDITS], ids=["greedy", "sampled", "edited"])
def test_everything_that_is_told_is_the_same(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str, params: list[dict[str, Any]]
) -> None:
    check(monkeypatch, llama, runner, params)


@pytest.mark.parametrize("runner", ["host", "device"])
def test_a_request_that_resumes_in_a_new_engine_goes_on_token_for_token(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str
) -> None:
    requests = requests_of(PARAMS)
    expected = make_engine(monkeypatch, llama, runner, speculative_config=None).generate(requests)
    for number in (1, 7, MAX_TOKENS - 1):
        engine = make_engine(monkeypatch, llama, runner)
        speculate(engine, expected)
        resumed = [
            msgspec.structs.replace(request, resumed_token_ids=expected[request.request_id][:number])
            for request in requests
        ]
        assert engine.generate(resumed) == {name: tokens[number:] for name, tokens in expected.items()}
        assert engine.scheduler._stats.drafts.num_accepted_tokens > 0 or number == MAX_TOKENS - 1


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_gpu_kernels_verify_drafts_as_they_decode(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setattr("tests.spec_decode.test_end_to_end.MAX_TOKENS", 6)
    check(monkeypatch, llama, "triton", PARAMS[:2])


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 16},
        {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "swap_space": 0.01},
        {"deterministic": True},
    ],
    ids=str,
)
def test_chunks_preemption_and_plain_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, llama: Path, runner: str, settings: dict[str, Any]
) -> None:
    if runner == "device" and "swap_space" in settings:
        pytest.skip("swapping is the host runner's here")
    check(monkeypatch, llama, runner, PARAMS, **settings)


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize(
    "model", ["GPT2LMHeadModel", "Gemma3ForCausalLM", "MistralForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_windows_latents_and_learned_positions_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: str, model: str
) -> None:
    path = make_tiny_model(model, tmp_path, **({"sliding_window": 8} if "Mistral" in model else {}))
    check(monkeypatch, path, runner, PARAMS)
