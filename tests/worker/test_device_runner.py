"""The runner of a device that works beside the host: the same tokens as Transformers', whatever is captured or in flight."""

from pathlib import Path
from typing import Any

import pytest
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run
from tests.worker.tiny_engine import TinyEngine, make_request

from quire.errors import EngineError
from quire.executor import selector


def make_engine(monkeypatch: pytest.MonkeyPatch, path: Path, kernels: str = "reference", **settings: Any) -> TinyEngine:
    platform = AsyncCpuPlatform(kernels)
    monkeypatch.setattr(selector, "current_platform", lambda _name: platform)
    engine = TinyEngine(path, **{"depth": 2, "block_size": 16} | settings)
    engine.platform = platform  # type: ignore[attr-defined]
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral", "gemma"])
def test_greedy_tokens_equal_transformers(
    model: str, depth: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(model)
    prompts = make_prompts()
    engine = make_engine(monkeypatch, path, depth=depth, max_num_batched_tokens=32)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    counts = engine.platform.last_runtime.counts  # type: ignore[attr-defined]
    assert counts["captured"] > 1 and counts["replayed"] > counts["captured"]


def test_without_graphs_tokens_are_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts()
    engine = make_engine(monkeypatch, llama, enforce_eager=True)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)
    assert engine.platform.last_runtime.counts["captured"] == 0  # type: ignore[attr-defined]


def test_random_tokens_equal_those_of_the_plain_runner(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts()
    params = [
        {"temperature": 0.9, "seed": 3}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 7, "seed": 1},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01, "seed": 9}, {"temperature": 0.8, "logprobs": 3, "seed": 5},
        {"temperature": 0.6, "presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "seed": 2},
    ]  # fmt: skip

    def requests() -> list[Any]:
        pairs = zip(prompts, params, strict=True)
        return [make_request(f"r{index}", prompt, **chosen) for index, (prompt, chosen) in enumerate(pairs)]

    plain = run(TinyEngine(llama, block_size=16), requests())
    assert run(make_engine(monkeypatch, llama), requests()) == plain


def test_idle_time_captures_the_common_steps_and_ends(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, llama)
    rounds = 0
    while engine.executor.idle():
        rounds += 1
        assert rounds < 100
    counts = engine.platform.last_runtime.counts  # type: ignore[attr-defined]
    assert counts["captured"] == rounds >= 8
    prompts = make_prompts()
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)


def test_prompt_logprobs_equal_those_of_the_plain_runner(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(engine: TinyEngine) -> list[float]:
        request = make_request("r", make_prompts((40,))[0], prompt_logprobs=2)
        engine.generate([request])
        found = [output.prompt_logprobs[row] for output in engine.raw for row in output.prompt_logprobs]
        return [value for entry in found for values in entry.logprobs for value in values]

    plain = logprobs(TinyEngine(llama, block_size=16, max_num_batched_tokens=16))
    ours = logprobs(make_engine(monkeypatch, llama, max_num_batched_tokens=16))
    assert len(ours) == len(plain) > 39
    assert ours == pytest.approx(plain, abs=1e-4)


def test_more_table_entries_than_a_packet_holds_go_ahead(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.worker import device_inputs

    monkeypatch.setattr(device_inputs, "MAX_UPDATES", 3)
    prompts = make_prompts((100, 90, 80))
    engine = make_engine(monkeypatch, llama, max_num_batched_tokens=512)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)


def test_a_device_error_names_the_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, llama, enforce_eager=True)
    runner = engine.executor._worker.runner  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner._model, "forward", fail)
    with pytest.raises(EngineError, match=r"step 0 failed on cpu \(30 tokens of 1 requests, largest 30\): an illegal"):
        engine.generate([make_request("r", make_prompts((30,))[0])])
