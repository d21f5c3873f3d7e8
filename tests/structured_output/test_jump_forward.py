"""Tokens that a form leaves no choice about are not drawn: the answers stay what they were, in fewer steps."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.structured_output.test_generation import make_device_engine, make_engine
from tests.worker.tiny_engine import TinyEngine, make_request

from quire import LLM, SamplingParams
from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.metrics.engine_metrics import EngineMetrics
from quire.request import EngineCoreOutputs, FinishReason
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.tokenizers.loader import get_tokenizer

EOS = 1
RECORD = {
    "type": "object",
    "properties": {
        "temperature": {"enum": ["fahrenheit", "celsius"]},
        "measurements": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 2},
        "station_name": {"type": "string", "maxLength": 5},
    },
    "required": ["temperature", "measurements", "station_name"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
DRAWN, JUMPING = ({"structured_outputs_config": {"disable_jump_forward": is_off}} for is_off in (True, False))


def requests(**params: Any) -> list[Any]:
    """Some with a form, two without, from different prompts."""
    common = {"max_tokens": 90, "ignore_eos": False, "eos_token_ids": [EOS]}
    return [
        make_request(
            f"r{seed}",
            [5 + seed] * (3 + 7 * seed),
            seed=seed,
            **common | {"temperature": 0.4 * seed, "structured_outputs": FORM if seed % 3 else None} | params,
        )
        for seed in range(6)
    ]


def assert_pages_are_free(engine: TinyEngine) -> None:
    pool = engine.scheduler.kv.pool
    assert pool.num_free == pool.num_usable


def test_the_same_tokens_come_in_fewer_steps(llama: Path) -> None:
    drawn, jumping = make_engine(llama, **DRAWN), make_engine(llama)
    expected = drawn.generate(requests())
    assert jumping.generate(requests()) == expected
    assert drawn.scheduler.stats().num_jumped_tokens == 0
    assert jumping.scheduler.stats().num_jumped_tokens > 40
    alone = [request for request in requests() if request.request_id == "r1"]
    drawn.steps, jumping.steps = [], []
    assert drawn.generate(alone) == jumping.generate(alone)
    assert len(jumping.steps) < len(drawn.steps) * 0.7
    assert_pages_are_free(jumping)
    text = get_tokenizer(str(llama)).decode(expected["r1"][:-1])
    jsonschema.validate(json.loads(text), RECORD)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_with_steps_in_flight_jumps_too(llama: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_engine(llama, **DRAWN).generate(requests())
    engine = make_device_engine(monkeypatch, llama, depth=depth, **JUMPING)
    assert engine.generate(requests()) == expected
    assert engine.scheduler.stats().num_jumped_tokens > 20
    assert_pages_are_free(engine)


def test_planning_ahead_of_the_plain_runner_jumps_too(llama: Path) -> None:
    engine = make_engine(llama, depth=2)
    assert engine.generate(requests()) == make_engine(llama, **DRAWN).generate(requests())
    assert engine.scheduler.stats().num_jumped_tokens > 20


@pytest.mark.parametrize("device", [False, True])
def test_preempted_rows_and_small_chunks_change_nothing(
    llama: Path, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 3 * 2 * 2 * 16 * 4 * 4
    settings: dict[str, Any] = {
        "block_size": 4,
        "kv_cache_memory_bytes": 60 * page_bytes,
        "max_num_batched_tokens": 30,
    }
    expected = make_engine(llama, **DRAWN).generate(requests(structured_outputs=FORM))
    tight = make_device_engine(monkeypatch, llama, **settings, **JUMPING) if device else make_engine(llama, **settings)
    assert tight.generate(requests(structured_outputs=FORM)) == expected
    stats = tight.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_jumped_tokens > 0
    assert_pages_are_free(tight)


@pytest.mark.parametrize("device", [False, True])
def test_a_row_that_thought_jumps_in_its_form(llama: Path, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (end,) = get_tokenizer(str(llama)).encode("z")
    params: dict[str, Any] = {"structured_outputs": FORM, "thinking": Thinking([end]), "logit_bias": {end: 4.0}}
    expected = make_engine(llama, **DRAWN).generate(requests(**params))
    engine = make_device_engine(monkeypatch, llama, **JUMPING) if device else make_engine(llama)
    assert engine.generate(requests(**params)) == expected
    assert engine.scheduler.stats().num_jumped_tokens > 0


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 1}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"bad_words_token_ids": [[7]]}],
    ids=lambda params: next(iter(params)),
)
def test_whoever_wants_more_of_each_token_gets_every_token_drawn(llama: Path, params: dict[str, Any]) -> None:
    engine = make_engine(llama)
    engine.generate(requests(structured_outputs=FORM, **params)[:2])
    assert engine.scheduler.stats().num_jumped_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_limits_and_stop_tokens_hold_in_the_middle_of_a_jump(llama: Path, depth: int) -> None:
    whole = make_engine(llama).generate(requests()[1:2])["r1"]
    for count in range(1, 14):
        engine = make_engine(llama, depth=depth)
        tokens = engine.generate(requests(max_tokens=count)[1:2])["r1"]
        assert tokens == whole[:count]
        assert engine.news["r1"][-1].finish_reason is FinishReason.LENGTH
        stopped = engine.generate(requests(stop_token_ids=[whole[count]])[1:2])["r1"]
        assert stopped == whole[: whole.index(whole[count]) + 1]
        assert engine.news["r1"][-1].stop_reason == whole[count]


def test_text_stop_strings_and_usage_are_right(llama: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20}
    drawing, jumping = (LLM(str(llama), **settings, **config) for config in (DRAWN, {}))
    params = [
        SamplingParams(n=2, seed=3, temperature=1.0, max_tokens=90, structured_outputs=FORM),
        SamplingParams(max_tokens=90, stop="ments", structured_outputs=FORM),
        SamplingParams(max_tokens=90, stop="ment", include_stop_str_in_output=True, structured_outputs=FORM),
        SamplingParams(max_tokens=20, min_tokens=10, structured_outputs=FORM),
    ]
    answers = [llm.generate(["hello"] * len(params), params, use_tqdm=False) for llm in (drawing, jumping)]
    for one, other in zip(*answers, strict=True):
        assert len(one.outputs) == len(other.outputs)
        for drawn, jumped in zip(one.outputs, other.outputs, strict=True):
            assert (jumped.text, jumped.token_ids) == (drawn.text, drawn.token_ids)
            assert (jumped.finish_reason, jumped.stop_reason) == (drawn.finish_reason, drawn.stop_reason)
    assert answers[1][2].outputs[0].text.endswith("measurement")


@pytest.mark.parametrize(("is_off", "jumps"), [(None, False), (True, False), (False, True)])
def test_a_device_beside_the_host_jumps_where_it_is_asked_to(
    llama: Path, is_off: bool | None, jumps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {} if is_off is None else {"structured_outputs_config": {"disable_jump_forward": is_off}}
    engine = make_device_engine(monkeypatch, llama, **settings)
    engine.generate(requests()[1:2])
    assert (engine.scheduler.stats().num_jumped_tokens > 0) is jumps


def test_jumped_tokens_are_counted(llama: Path) -> None:
    engine, metrics = make_engine(llama), EngineMetrics("m", 100)
    taken: list[EngineCoreOutputs] = []
    update = engine.scheduler.update
    engine.scheduler.update = lambda *args: taken.append(update(*args)) or taken[-1]  # type: ignore[method-assign]
    tokens = engine.generate(requests()[1:2])["r1"]
    for outputs in taken:
        if outputs.stats is not None:
            metrics.record_step(outputs.stats)
    assert (
        metrics.counts["jumped_tokens"]
        == engine.scheduler.stats().num_jumped_tokens
        == len(tokens) - metrics.counts["engine_steps"]
    )
    assert engine.scheduler.inspection.state()["generation_tokens_total"] == len(tokens)


def test_what_is_streamed_is_always_the_beginning_of_the_answer(llama: Path) -> None:
    async def run() -> list[tuple[str, list[int]]]:
        args = EngineArgs(model=str(llama), dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20)
        engine = AsyncLLM(args.create_engine_config())
        try:
            params = SamplingParams(temperature=1.0, seed=1, max_tokens=90, structured_outputs=FORM)
            return [
                (output.outputs[0].text, list(output.outputs[0].token_ids))
                async for output in engine.generate("hello", params, "r")
            ]
        finally:
            engine.shutdown()

    seen = asyncio.run(run())
    text, token_ids = seen[-1]
    jsonschema.validate(json.loads(text), RECORD)
    assert len(seen) < len(token_ids)
    for part, ids in seen:
        assert text.startswith(part) and token_ids[: len(ids)] == ids


@pytest.mark.exhaustive
def test_the_gpu_s_kernels_compute_jumps(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    expected = make_engine(llama, **DRAWN).generate(requests(max_tokens=8)[1:2])
    engine = make_device_engine(monkeypatch, llama, kernels="cuda", **JUMPING)
    assert engine.generate(requests(max_tokens=8)[1:2]) == expected
    assert engine.scheduler.stats().num_jumped_tokens > 0
