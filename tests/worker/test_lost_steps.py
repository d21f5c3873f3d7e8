"""A device that runs out of memory in the middle of a step, or of its draw: the same tokens in the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run
from tests.worker.tiny_engine import make_request

from quire.request import FinishReason


class Shortage:
    """Calls a function that has memory for so many rows, and finds none after it for more: by then it has written."""

    def __init__(self, function: Any, room: int, rows_of: Callable[[Any], int]) -> None:
        self.function, self.room, self.rows_of, self.raised = function, room, rows_of, 0

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        if self.rows_of(args[0]) > self.room:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_tokens_are_the_same_after_steps_that_were_lost(
    model: str, depth: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(model)
    prompts = make_prompts()
    engine = make_engine(monkeypatch, path, depth=depth, max_num_batched_tokens=32, enforce_eager=True)
    runner = engine.executor._worker.runner  # type: ignore[attr-defined]
    shortage = Shortage(runner._model.forward, 9, lambda _: int(runner._inputs.host.shape[0]))
    monkeypatch.setattr(runner._model, "forward", shortage)
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    assert shortage.raised > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_the_same_after_draws_that_were_lost(
    llama: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    params = {"temperature": 0.8, "top_k": 9, "presence_penalty": 0.4, "max_tokens": 12}

    def requests() -> list[Any]:
        return [make_request(f"r{index}", prompt, seed=index, **params) for index, prompt in enumerate(prompts)]

    undisturbed = run(make_engine(monkeypatch, llama, depth=depth), requests())
    engine = make_engine(monkeypatch, llama, depth=depth)
    runner = engine.executor._worker.runner  # type: ignore[attr-defined]
    shortage = Shortage(runner._sampler.sample, 2, len)
    monkeypatch.setattr(runner._sampler, "sample", shortage)
    assert run(engine, requests()) == undisturbed
    assert shortage.raised > 0


def test_a_request_for_which_there_is_never_memory_ends_with_the_reason(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(monkeypatch, llama, enforce_eager=True)
    runner = engine.executor._worker.runner  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "forward", Shortage(runner._model.forward, 0, lambda _: 1))
        engine.generate([make_request("r", make_prompts((30,))[0])])
        (output,) = engine.news["r"]
        assert output.finish_reason is FinishReason.ERROR and "out of device memory: CUDA out of memory" in output.error
    prompts = make_prompts()
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)
