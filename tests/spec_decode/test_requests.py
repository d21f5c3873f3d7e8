"""Speculation behind `LLM`: what requests ask for, and what happens to an engine meanwhile, changes no token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.sampling_params import BeamSearchParams

ALWAYS = {"method": "suffix", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [40, 41, 40, 41, 40, 41, 9], [5, 6, 7, 8] * 9]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(llama: Path) -> dict[str, LLM]:
    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 160, "max_num_seqs": 8, "block_size": 16, "kv_cache_memory_bytes": 1 << 24,
        "max_logprobs": 10, "enable_sleep_mode": True,
    }  # fmt: skip
    return {
        name: LLM(str(llama), speculative_config=chosen, **settings)
        for name, chosen in (("with", ALWAYS), ("without", None))
    }


def answers(llm: LLM, **params: Any) -> list[Any]:
    """What is told of each answer, but for logprobs' values, which may differ in their last bits (`test_end_to_end` has them)."""
    chosen = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], chosen, use_tqdm=False)
    return [
        (one.index, list(one.token_ids), one.text, one.finish_reason, one.stop_reason, _ranks(one.logprobs))
        for output in outputs
        for one in output.outputs
    ]


def _ranks(logprobs: Any) -> Any:
    return logprobs and [{token: entry.rank for token, entry in each.items()} for each in logprobs]


REQUESTS: dict[str, dict[str, Any]] = {
    "several answers": {"n": 3, "temperature": 1.1, "seed": 4},
    "stop strings": {"stop": ["e", "a"], "temperature": 0.7, "seed": 1, "max_tokens": 60},
    "stop tokens": {"stop_token_ids": list(range(100, 140)), "min_tokens": 6, "temperature": 0.4, "seed": 2},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0.3, "seed": 8},
    "few tokens": {"allowed_token_ids": [5, 6, 7, 40, 41], "temperature": 0.9, "seed": 3},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_answered_alike(engines: dict[str, LLM], name: str) -> None:
    before = engines["with"].call("stats").num_draft_tokens
    assert answers(engines["with"], **REQUESTS[name]) == answers(engines["without"], **REQUESTS[name])
    assert (engines["with"].call("stats").num_draft_tokens > before) == (name != "one token")


def test_beams_are_the_same(engines: dict[str, LLM]) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    found = [
        [
            sequence.tokens
            for output in llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], params)
            for sequence in output.sequences
        ]
        for llm in engines.values()
    ]
    assert found[0] == found[1]


def reset(llm: LLM) -> None:
    llm.reset_prefix_cache()


def sleep(llm: LLM) -> None:
    llm.sleep(level=1)
    llm.wake_up()


@pytest.mark.parametrize("meanwhile", [reset, sleep])
def test_an_engine_that_has_slept_or_forgotten_answers_alike(
    engines: dict[str, LLM], meanwhile: Callable[[LLM], None]
) -> None:
    expected = answers(engines["without"], temperature=0.8, seed=6)
    assert answers(engines["with"], temperature=0.8, seed=6) == expected
    meanwhile(engines["with"])
    assert answers(engines["with"], temperature=0.8, seed=6) == expected
    assert sum(engines["with"].call("stats").accepted_per_position) > 0
