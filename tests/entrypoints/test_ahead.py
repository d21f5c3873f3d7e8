"""A call's requests in parts: in order, ahead of who takes them, and none after an error or the end."""

import threading
from typing import Any

import numpy as np
import pytest
from tests.oracles.media_parity import COMMON
from tests.oracles.tiny_vision import IMAGE, make_tiny_vision

import quire.entrypoints.ahead as module
import quire.entrypoints.llm as llm_module
from quire import LLM, SamplingParams
from quire.entrypoints.ahead import PARTS_AHEAD, Ahead
from quire.errors import RequestError

MOST = 10
"""Seconds until a test fails that waits for what does not come."""


def numbers(part: slice) -> Any:
    return list(range(10))[part]


@pytest.mark.parametrize("part", [1, 3, 10, 99])
def test_parts_come_whole_and_in_order(part: int) -> None:
    ahead = Ahead(numbers, 10, part)
    found = list(ahead.first)
    while ahead.is_left:
        found += ahead.take(wait=True)
    assert found == numbers(slice(None)) and ahead.take(wait=True) == ()
    ahead.close()


def test_no_prompts_are_no_part() -> None:
    ahead = Ahead(lambda part: numbers(part), 0, 0)
    assert ahead.first == [] and not ahead.is_left
    ahead.close()


def test_a_part_is_prepared_while_nobody_waits_and_no_more_than_two_ahead() -> None:
    begun, gate = [threading.Event() for _ in range(10)], threading.Event()

    def prepare(part: slice) -> Any:
        begun[part.start].set()
        if part.start:
            assert gate.wait(MOST)
        return numbers(part)

    ahead = Ahead(prepare, 10, 1)
    assert begun[1].wait(MOST) and ahead.take(wait=False) == ()  # it is being prepared
    gate.set()
    assert begun[PARTS_AHEAD].wait(MOST)
    assert ahead.take(wait=True) == [1] and begun[PARTS_AHEAD + 1].wait(MOST)
    assert not begun[PARTS_AHEAD + 2].is_set()
    ahead.close()
    assert not ahead.is_left and not begun[9].is_set()


def test_an_error_is_told_where_its_part_is_taken() -> None:
    def prepare(part: slice) -> Any:
        if part.start == 2:
            raise RequestError("broken", param="prompt")
        return numbers(part)

    ahead = Ahead(prepare, 10, 1)
    assert ahead.take(wait=True) == [1]
    with pytest.raises(RequestError, match="broken"):
        ahead.take(wait=True)
    ahead.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory):
    path = make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("llava"))
    with LLM(model=str(path), dtype="float32", **COMMON, max_num_seqs=3) as llm:
        yield llm


def test_prompts_with_images_run_in_parts_and_an_error_takes_all_back(
    seeing: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8) for seed in range(7)]
    prompts: list[Any] = [
        {"prompt_token_ids": [5, IMAGE, 6 + place], "multi_modal_data": {"image": image}}
        for place, image in enumerate(images)
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=2 + place, ignore_eos=True) for place in range(7)]
    expected = [
        seeing.generate([each], own, use_tqdm=False)[0].outputs[0].token_ids
        for each, own in zip(prompts, params, strict=True)
    ]
    parts: list[int] = []
    real = Ahead.take

    def take(self: Ahead, *, wait: bool) -> Any:
        found = real(self, wait=wait)
        parts.extend([len(found)] if found else [])
        return found

    monkeypatch.setattr(Ahead, "take", take)
    for each in (module, llm_module):
        monkeypatch.setattr(each, "PART", 2)
    bars: list[int] = []

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            bars.append(total)

        def update(self, count: int) -> None:
            bars[0] -= count

        def close(self) -> None: ...

    outputs = seeing.generate(prompts, params, use_tqdm=Bar)
    assert [output.outputs[0].token_ids for output in outputs] == expected and parts == [2, 2, 1] and bars == [0]
    prompts[-1]["multi_modal_data"] = {"image": "no image"}
    with pytest.raises(RequestError):
        seeing.generate(prompts, params, use_tqdm=False)
    assert not seeing.llm_engine.has_unfinished_requests()
    assert seeing.generate(prompts[:1], params[0], use_tqdm=False)[0].outputs[0].token_ids == expected[0]
