"""Custom logits processors: both forms a request may bring, engine-wide ones, and what their failures may harm."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.sample.helpers import add, draw, make_sampler, random_logits

from quire.errors import ConfigError
from quire.sample.logits_processor import LogitsProcessor, load_logits_processors
from quire.sampling_params import SamplingParams


def only(token: int, logits: torch.Tensor) -> torch.Tensor:
    edited = torch.full_like(logits, -torch.inf)
    edited[token] = 0
    return edited


def test_a_request_may_bring_a_processor_of_two_arguments_that_sees_its_output() -> None:
    seen: list[list[int]] = []

    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(output))
        return only(10 + len(output), logits)

    sampler = make_sampler()
    add(sampler, 0, prompt=[1, 2], output=[3], temperature=0.0, logits_processors=[processor])
    add(sampler, 1, prompt=[1, 2], temperature=0.0)
    logits = random_logits(2)
    tokens = [draw(sampler, logits, [0, 1], [3 + step, 2 + step]).token_ids.tolist() for step in range(3)]
    assert [token for token, _ in tokens] == [11, 12, 13]
    assert {token for _, token in tokens} == {int(logits[1].argmax())}
    assert seen == [[3], [3, 11], [3, 11, 12]]


def test_a_request_may_bring_a_processor_of_three_arguments_that_sees_its_prompt_too() -> None:
    def processor(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return only(sum(prompt) + len(output), logits)

    sampler = make_sampler()
    add(sampler, 0, prompt=[20, 30], temperature=1.0, logits_processors=[processor])
    assert draw(sampler, random_logits(1), [0], [2]).token_ids[0] == 50


def test_processors_that_edit_in_place_count_as_well() -> None:
    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:60] = -torch.inf
        return logits

    sampler = make_sampler()
    add(sampler, 0, temperature=1.0, logits_processors=[processor])
    assert draw(sampler, random_logits(1), [0], [2]).token_ids[0] >= 60


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda output, logits: 1 / 0, "ZeroDivisionError"),
        (lambda output, logits: logits[:5], r"it returned \(5,\) in place of logits of shape"),
        (lambda output, logits: None, "it returned NoneType"),
        (lambda logits: logits, "takes 1 arguments"),
    ],
)
def test_a_failing_processor_ends_only_its_own_row(processor: Any, message: str) -> None:
    sampler = make_sampler()
    add(sampler, 0, temperature=0.0, logits_processors=[processor])
    add(sampler, 1, temperature=0.0)
    logits = random_logits(2)
    result = draw(sampler, logits, [0, 1], [1, 1])
    assert list(result.errors) == [0]
    assert re.search(message, result.errors[0])
    assert result.token_ids[1] == logits[1].argmax()


class Favourite(LogitsProcessor):
    """Rows may ask for a favourite token; 666 breaks `apply`, 777 breaks `add_row`."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.wanted: dict[int, int] = {}
        self.calls: list[list[int]] = []

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if isinstance((params.extra_args or {}).get("favourite"), str):
            raise ValueError("favourite must be a token id")

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        favourite = (params.extra_args or {}).get("favourite")
        if favourite == 777:
            raise RuntimeError("no such favourite")
        if favourite is not None:
            self.wanted[row] = favourite
        return favourite is not None

    def remove_row(self, row: int) -> None:
        del self.wanted[row]

    def apply(self, logits_NV: torch.Tensor, rows_N: np.ndarray) -> torch.Tensor:
        self.calls.append(rows_N.tolist())
        for logits_V, row in zip(logits_NV, rows_N.tolist(), strict=True):
            if self.wanted[row] == 666:
                raise RuntimeError("beastly")
            logits_V.copy_(only(self.wanted[row], logits_V))
        return logits_NV


def test_an_engine_processor_gets_the_rows_that_it_wants_together() -> None:
    processor = Favourite(None, torch.device("cpu"), False)
    sampler = make_sampler(processors=[processor])
    add(sampler, 0, temperature=0.0, extra_args={"favourite": 40})
    add(sampler, 1, temperature=0.0)
    add(sampler, 2, temperature=1.0, extra_args={"favourite": 41})
    logits = random_logits(3)
    assert draw(sampler, logits, [0, 1, 2], [1, 1, 1]).token_ids.tolist() == [40, int(logits[1].argmax()), 41]
    assert processor.calls == [[0, 2]]
    sampler.remove_row(0)
    assert processor.wanted == {2: 41}


def test_a_row_that_breaks_an_engine_processor_ends_alone() -> None:
    sampler = make_sampler(processors=[Favourite(None, torch.device("cpu"), False)])
    for row, favourite in enumerate([40, 666, 42, 777, "x"]):
        add(sampler, row, temperature=0.0, extra_args={"favourite": favourite})
    result = draw(sampler, random_logits(5), [0, 1, 2, 3, 4], [1] * 5)
    assert (result.token_ids[0], result.token_ids[2]) == (40, 42)
    assert sorted(result.errors) == [1, 3, 4]
    assert "beastly" in result.errors[1]
    assert "no such favourite" in result.errors[3]
    assert "favourite must be a token id" in result.errors[4]


def test_processors_are_loaded_from_classes_and_paths() -> None:
    loaded = load_logits_processors([Favourite, f"{__name__}:Favourite"], None, torch.device("cpu"))  # type: ignore[arg-type]
    assert [type(item).__name__ for item in loaded] == ["Favourite", "Favourite"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.at.all:Thing", "cannot be imported"),
        ("json:Missing", "cannot be imported"),
        ("Thing", "module:Class"),
        ("json:JSONDecoder", "not a subclass"),
        (int, "not a subclass"),
    ],
)
def test_what_is_not_a_logits_processor_is_refused_by_name(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_logits_processors([spec], None, torch.device("cpu"))  # type: ignore[arg-type]
