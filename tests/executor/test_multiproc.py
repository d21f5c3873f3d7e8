"""The executor with a process a rank, over gloo: the same tokens as one process, whatever the schedule does; and its calls."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.oracles.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.codec import encode
from quire.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprobs
from quire.entrypoints.llm import LLM
from quire.errors import EngineError, RequestError
from quire.executor import wire
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

TROUBLED = "tests.executor.rank_workers:TroubledWorker"
ASYNC = "tests.executor.rank_workers:AsyncWorker"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def two(llama: Path) -> Iterator[TinyEngine]:
    """Two ranks; prompts are computed 16 tokens a step."""
    engine = TinyEngine(llama, tensor_parallel_size=2, worker_cls=TROUBLED, max_num_batched_tokens=16)
    yield engine
    engine.executor.shutdown()


def prompt(length: int, seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % (VOCAB_SIZE - 3) for i in range(length)]


def requests(**params: Any) -> list[EngineRequest]:
    """Long and short prompts, two that begin alike; greedy and random rows, with and without logprobs."""
    shared = prompt(24, 9)
    made = [make_request(f"r{n}", prompt(length, n), **params) for n, length in enumerate((5, 40, 61, 1))]
    made.append(make_request("alike-1", [*shared, 7, 8], logprobs=3, prompt_logprobs=2, **params))
    made.append(make_request("alike-2", [*shared, 9], seed=5, temperature=0.8, top_p=0.9, logprobs=2, **params))
    return made


def compare(path: Path, parallel: TinyEngine, **engine_args: Any) -> None:
    """The same requests twice (the second time from cached prefixes) through both."""
    one = TinyEngine(path, depth=parallel.depth, **engine_args)
    for _ in range(2):
        assert parallel.generate(requests()) == one.generate(requests())
        for name, news in one.news.items():
            for mine, theirs in zip(parallel.news[name], news, strict=True):
                assert mine.num_cached_tokens == theirs.num_cached_tokens
                told = [
                    [one or TokenLogprobs() for one in (output.logprobs, output.prompt_logprobs)]
                    for output in (mine, theirs)
                ]
                assert told[0][0].token_ids == told[1][0].token_ids
                for ours, others in zip(*told, strict=True):
                    for a, b in zip(ours.logprobs, others.logprobs, strict=True):
                        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_two_processes_draw_what_one_draws(llama: Path, two: TinyEngine) -> None:
    compare(llama, two, max_num_batched_tokens=16)


def test_each_rank_has_its_share_of_the_cores(two: TinyEngine) -> None:
    threads = two.executor.collective_rpc("threads")
    assert threads == [max(1, two.config.device.cpu_threads // 2)] * 2


def test_calls_reach_every_rank_with_their_arguments(two: TinyEngine) -> None:
    value = {"a": [1, 2.5, None], "b": "é"}
    assert two.executor.collective_rpc("echo", (value,), {"twice": True}) == [[value, value]] * 2


def test_a_message_larger_than_the_ring_arrives_whole(two: TinyEngine) -> None:
    value = "0123456789abcdef" * (3 << 20)
    assert two.executor.collective_rpc("echo", (value,)) == [value, value]


@pytest.mark.parametrize(
    ("method", "args", "error", "message"),
    [
        ("no_such", (), RequestError, "rank 0: the worker has no method 'no_such'"),
        ("_timings", (), RequestError, "has no method"),
        (lambda worker: worker, (), RequestError, "a function cannot be sent"),
        ("refuse", (1,), ValueError, "rank 1 does not want to"),
        ("torch_was_sent", (), EngineError, "cannot be sent to another process"),
    ],
)
def test_an_error_of_a_call_is_raised_and_the_ranks_go_on(
    two: TinyEngine, method: str, args: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        two.executor.collective_rpc(method, args)
    assert two.executor.collective_rpc("echo", (1,)) == [1, 1]


def test_a_call_waits_no_longer_than_its_timeout_and_the_ranks_go_on(two: TinyEngine, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with pytest.raises(TimeoutError, match="answer_late: rank 1 gave no answer within"):
        two.executor.collective_rpc("answer_late", (1, str(go)), timeout=0.05)
    go.touch()
    assert two.executor.collective_rpc("echo", (1,), timeout=60.0) == [1, 1]


def test_collecting_without_a_step_is_an_error(two: TinyEngine) -> None:
    with pytest.raises(EngineError, match="without a step in flight"):
        two.executor.collect()


def test_explain_names_the_ranks(two: TinyEngine) -> None:
    report = two.executor.explain()
    assert report["executor"] == "mp" and report["platform"] == "cpu"
    assert [entry["rank"] for entry in report["ranks"]] == [0, 1]
    assert len({entry["pid"] for entry in report["ranks"]}) == 2


def test_a_request_with_functions_is_refused(two: TinyEngine) -> None:
    request = make_request("r", [1], logits_processors=[lambda ids, logits: logits])
    with pytest.raises(RequestError, match="logits_processors"):
        two.executor.check_request(request)


@pytest.mark.parametrize("level", [1, 2])
def test_the_ranks_sleep_and_wake(two: TinyEngine, level: int) -> None:
    expected = two.generate([make_request("r", prompt(9, 3))])
    two.executor.sleep(level)
    two.executor.wake_up()
    two.initialize()
    assert two.generate([make_request("r", prompt(9, 3))]) == expected


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_two_devices_that_work_beside_the_host_draw_what_one_draws(llama: Path, depth: int) -> None:
    settings: dict[str, Any] = {
        "worker_cls": ASYNC,
        "max_num_batched_tokens": 16,
        "max_model_len": 100,
        "num_gpu_blocks_override": 40,
    }
    engine = TinyEngine(llama, depth=depth, tensor_parallel_size=2, **settings)
    try:
        compare(llama, engine, **settings)
        assert engine.executor.idle() in (True, False)
    finally:
        engine.executor.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 4}),
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("GPT2LMHeadModel", {}),
        ("Gemma3ForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 8}),
        ("GraniteForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {}),
    ],
)
@pytest.mark.parametrize("worker", ["auto", ASYNC])
def test_every_kind_of_model_under_preemption(
    architecture: str, settings: dict[str, Any], size: int, worker: str, tmp_path: Path
) -> None:
    """Pages are so few that requests are preempted and computed again."""
    path = make_tiny_model(architecture, tmp_path, **settings)
    num_blocks, length = (60, 93) if architecture == "Gemma3ForCausalLM" else (44, 100)
    engine_args: dict[str, Any] = {
        "max_num_batched_tokens": 24, "max_model_len": length, "num_gpu_blocks_override": num_blocks, "worker_cls": worker,
    }  # fmt: skip
    engine = TinyEngine(path, depth=2, tensor_parallel_size=size, **engine_args)
    try:
        compare(path, engine, **engine_args)
        # A window over all layers leaves pages free as it goes on.
        assert engine.scheduler.stats().num_preemptions > 0 or architecture == "MistralForCausalLM"
    finally:
        engine.executor.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_kernels_of_a_gpu_draw_what_a_cpu_draws(architecture: str, tmp_path: Path) -> None:
    """In Triton's interpreter: layers are fused there, and the residual itself is summed."""
    path = make_tiny_model(architecture, tmp_path)
    lots = [make_request(f"r{n}", prompt(length, n), max_tokens=4) for n, length in enumerate((5, 14))]
    one = TinyEngine(path).generate(lots)
    two = TinyEngine(
        path, tensor_parallel_size=2, worker_cls="tests.executor.rank_workers:InterpretedWorker", max_num_seqs=2,
        max_num_batched_tokens=32, max_model_len=64, enforce_eager=True,
    )  # fmt: skip
    try:
        assert two.generate(lots) == one
    finally:
        two.executor.shutdown()


def test_the_offline_engine_takes_the_setting(llama: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    texts = []
    for size in (1, 2):
        llm = LLM(str(llama), tensor_parallel_size=size, **settings)
        texts.append([output.outputs[0].text for output in llm.generate(["hello world", "one two"], params)])
        llm.shutdown()
    assert texts[0] == texts[1]


def test_messages_survive_the_way() -> None:
    new = NewRequestData("r", 3, [1, 2, 70000], 2, 1, [[4], [5, 6]], SamplingParams(stop=["x"], seed=1), None, 2**63)
    plan = SchedulerOutput(
        step_id=7,
        rows=np.array([3, 1], dtype=np.int32),
        num_scheduled_tokens=np.array([2, 1], dtype=np.int32),
        needs_sample=np.array([True, False]),
        total_num_tokens=3,
        new_requests=[new],
        new_blocks=[(1, 0, [9])],
        extras={"a": [1]},
    )
    got = wire.decode_to_worker(encode(wire.Step(plan)))
    assert isinstance(got, wire.Step)
    for field in ("rows", "num_scheduled_tokens", "needs_sample"):
        mine, theirs = getattr(got.plan, field), getattr(plan, field)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert got.plan.new_requests == [new] and got.plan.new_blocks == [(1, 0, [9])] and got.plan.extras == {"a": [1]}
    output = ModelRunnerOutput(7, plan.rows, plan.rows, logprobs={3: TokenLogprobs([[1]], [[-0.5]], [2])}, step_ms=1.5)
    back = wire.decode_from_worker(encode(wire.Result(output)))
    assert isinstance(back, wire.Result) and back.output.logprobs == output.logprobs and back.output.step_ms == 1.5
    assert dataclasses.is_dataclass(plan) is False


def test_what_is_no_array_is_refused_as_one() -> None:
    wrong = encode(wire.Answer(1, 5))
    with pytest.raises(Exception, match=r"Invalid|Expected"):
        wire.decode_to_worker(wrong)
