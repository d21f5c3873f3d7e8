"""The sampler beside one that computes each row by itself: the same rows, logits and steps give the same tokens,
logprobs and errors.

Runs on CPU tensors, with the references and with Triton's kernels in its interpreter.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles.plain_sampler import SamplerOutput
from tests.sample import helpers
from tests.sample.helpers import VOCAB, columns_of, draw, make_plain_sampler, random_logits

from quire.kernels import cpu, ops
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams, Thinking

ROWS = 16


@pytest.fixture(params=["references", "triton", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which implementations serve."""
    if request.param == "triton":
        triton = pytest.importorskip("quire.kernels.triton")
        triton.register()
    if request.param == "cpu":
        cpu.register()
    ops.select({"references": "reference", "triton": "cuda"}.get(request.param, request.param))
    yield request.param
    ops.select("reference")  # no platform of that name: PyTorch alone, whatever other tests have registered


def make_sampler(mode: str = "raw_logprobs", processors: list[LogitsProcessor] | None = None) -> Sampler:
    return helpers.make_sampler(rows=ROWS, mode=mode, processors=processors)


def random_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.9])}
    maybe: dict[str, Any] = {
        "top_k": lambda: rng.choice([1, 2, 5, 20, 96, 97, 500]),
        "top_p": lambda: rng.choice([0.01, 0.3, 0.9, 0.999]),
        "min_p": lambda: rng.choice([0.001, 0.05, 0.5, 1.0]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {rng.randrange(VOCAB + 9): rng.uniform(-20, 20) for _ in range(4)},
        "allowed_token_ids": lambda: rng.sample(range(VOCAB), 20),
        "logprobs": lambda: rng.choice([0, 1, 5, 20, 70, -1]),
        "logprob_token_ids": lambda: rng.sample(range(VOCAB), rng.choice([1, 3, 80])),
    }
    for name, value in maybe.items():
        if rng.random() < 0.3:
            params[name] = value()
    if rng.random() < 0.3:
        params["bad_words_token_ids"] = [[rng.randrange(VOCAB)], [rng.randrange(VOCAB)]]
        if rng.random() < 0.5:
            params["bad_words_token_ids"] += [[rng.randrange(5), rng.randrange(VOCAB)], [1, 2, 3]]
    if rng.random() < 0.3:
        params |= {"min_tokens": rng.randrange(8), "eos_token_ids": [7], "stop_token_ids": [11, 12]}
    if rng.random() < 0.3:
        start = rng.choice([None, rng.randrange(5)])
        params |= {"thinking": Thinking([rng.randrange(5)], start), "thinking_token_budget": rng.randrange(8)}
    return params


def assert_equal_outputs(ours: SamplerOutput, theirs: SamplerOutput) -> None:
    assert ours.errors == theirs.errors
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    for row, entry in theirs.logprobs.items():
        assert ours.logprobs[row].ranks == entry.ranks
        np.testing.assert_allclose(ours.logprobs[row].logprobs[0], entry.logprobs[0], rtol=1e-5, atol=1e-5)
        # Of equal logits (hidden ones, for instance) any may come first.
        finite = np.isfinite(entry.logprobs[0])
        ids, expected = np.array(ours.logprobs[row].token_ids[0]), np.array(entry.token_ids[0])
        assert ids[finite].tolist() == expected[finite].tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in (1, 2, 3))])
def test_tokens_logprobs_and_errors_are_those_of_each_row_by_itself(case: int, mode: str, kernels: str) -> None:
    rng = random.Random(f"{case} {mode}")
    ours, theirs = make_sampler(mode), make_plain_sampler(mode=mode, rows=ROWS)
    length: dict[int, int] = {}
    for step in range(5):
        for row in rng.sample(range(ROWS), 3 if step else 9):
            if row in length:
                for sampler in (ours, theirs):
                    sampler.remove_row(row)
            params = SamplingParams(**random_params(rng))
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            output = [rng.randrange(5) for _ in range(rng.randrange(8))]
            seed = rng.randrange(-(2**63), 2**63)
            for sampler in (ours, theirs):
                sampler.add_row(row, params, prompt, output, seed)
            length[row] = len(prompt) + len(output)
        rows = rng.sample(sorted(length), rng.randrange(1, len(length) + 1))
        # Coarse logits: penalties and constraints change which token wins, and equal ones occur.
        logits_SV = random_logits(len(rows), seed=case * 10 + step, scale=2.0)
        if case % 2:
            logits_SV = (logits_SV * 4).round() / 4 + 0.0
        positions = [length[row] for row in rows]
        rows_S, positions_S = np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int32)
        expected = theirs.sample(logits_SV.clone(), rows_S, positions_S)
        seen = draw(ours, logits_SV, rows, positions)
        if case % 2:  # of equal logits any alternative may come first
            seen.logprobs.clear()
            expected.logprobs.clear()
        assert_equal_outputs(seen, expected)
        for row in rows:
            length[row] += 1


def test_a_batch_says_what_it_needs() -> None:
    sampler = make_sampler()
    rows: dict[int, dict[str, Any]] = {
        0: {"temperature": 0.0},
        1: {"temperature": 1.0},
        2: {"top_p": 0.5},
        3: {"frequency_penalty": 1.0, "min_tokens": 2, "eos_token_ids": [1]},
        4: {"bad_words_token_ids": [[5]]},
        5: {"bad_words_token_ids": [[5, 6]]},
        6: {"logits_processors": [lambda output, logits: logits]},
    }
    for row, params in rows.items():
        sampler.add_row(row, SamplingParams(**params), [1], [], 0)
    wanted = {row: sampler.wanted(np.array([row], dtype=np.int32)) for row in rows}
    assert [row for row in rows if sampler.is_plain(wanted[row])] == [0, 1]
    assert [row for row in rows if sampler.needs_tokens(wanted[row])] == [5, 6]
    assert sampler.is_plain(sampler.wanted(np.array([0, 1], dtype=np.int32)))
    assert not sampler.is_plain(sampler.wanted(np.array([0, 2], dtype=np.int32)))
    assert sampler.is_plain(sampler.wanted(np.zeros(0, dtype=np.int32)))
    sampler.remove_row(6)
    assert not sampler.needs_tokens(sampler.wanted(np.array([6], dtype=np.int32)))


def test_a_drawn_token_is_counted_before_the_host_knows_it(kernels: str) -> None:
    sampler = make_sampler()
    sampler.add_row(3, SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=99), [1], [], 0)
    logits_1V = torch.zeros(1, VOCAB)
    logits_1V[0, 10], logits_1V[0, 20], logits_1V[0, 30] = 5.0, 4.5, 2.0
    rows_S, tokens = np.array([3], dtype=np.int32), []
    for position in range(1, 7):
        positions_S, out_1 = np.array([position], dtype=np.int32), torch.zeros(1, dtype=torch.int32)
        columns = columns_of(sampler, rows_S, positions_S)
        sampler.sample(logits_1V.clone(), columns, rows_S, positions_S, sampler.wanted(rows_S), out_1)
        tokens.append(int(out_1))
    assert tokens == [10, 20, 10, 20, 30, 10]


def test_tables_grow_with_rows_and_tokens(kernels: str) -> None:
    sampler, plain = make_sampler(), make_plain_sampler(rows=ROWS)
    for row in range(ROWS):
        params = SamplingParams(
            temperature=0.0,
            repetition_penalty=1.2 + row / 10,
            presence_penalty=0.3,
            logit_bias={token: 0.1 * token for token in range(row * 6)},
            allowed_token_ids=list(range(row, VOCAB)),
            max_tokens=500,
        )
        for each in (sampler, plain):
            each.add_row(row, params, list(range(row * 5)), [4, 4, 9], row)
    rows_S = np.arange(ROWS, dtype=np.int32)
    for step in range(3):
        logits_SV = random_logits(ROWS, seed=step)
        positions_S = rows_S * 5 + 3 + step
        expected = plain.sample(logits_SV.clone(), rows_S, positions_S)
        assert draw(sampler, logits_SV, rows_S, positions_S).token_ids.tolist() == expected.token_ids.tolist()


class AddsTen(LogitsProcessor):
    """Prefers a token to all others; fails where a row has generated one."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        self.outputs[row] = output_token_ids
        return True

    def remove_row(self, row: int) -> None:
        del self.outputs[row]

    def apply(self, logits_NV: torch.Tensor, rows_N: np.ndarray) -> torch.Tensor:
        if any(self.outputs[row] for row in rows_N.tolist()):
            raise ValueError("enough")
        logits_NV[:, 42] += 100
        return logits_NV


def test_custom_processors_see_the_tokens_that_were_appended() -> None:
    processor = AddsTen()
    sampler = make_sampler(processors=[processor])
    sampler.add_row(0, SamplingParams(temperature=0.0), [1], [], 0)
    sampler.add_row(1, SamplingParams(temperature=0.0), [1], [3], 0)
    assert sampler.needs_tokens(sampler.wanted(np.array([0], dtype=np.int32)))
    output = draw(sampler, random_logits(2), [0, 1], [1, 2])
    assert output.token_ids[0] == 42
    assert list(output.errors) == [1]
    assert processor.outputs[0] == [42]
    assert list(draw(sampler, random_logits(1), [0], [2]).errors) == [0]
    sampler.remove_row(0)
    assert list(processor.outputs) == [1]


def test_a_row_whose_stops_are_free_again_returns_to_the_fast_path() -> None:
    sampler = make_sampler()
    sampler.add_row(0, SamplingParams(temperature=0.0, min_tokens=1, eos_token_ids=[7], max_tokens=5), [1], [], 0)
    logits_1V = torch.zeros(1, VOCAB)
    logits_1V[0, 7] = 9.0
    assert draw(sampler, logits_1V, [0], [1]).token_ids[0] != 7
    assert draw(sampler, logits_1V, [0], [2]).token_ids[0] == 7
    assert sampler.is_plain(sampler.wanted(np.array([0], dtype=np.int32)))


def test_prompt_logprobs_have_the_rows_own_number_of_alternatives() -> None:
    sampler, plain = make_sampler(), make_plain_sampler(rows=ROWS)
    for each in (sampler, plain):
        each.add_row(0, SamplingParams(prompt_logprobs=2), [1, 2, 3], [], 0)
    logits_NV, token_ids_N = random_logits(2, seed=3), np.array([2, 3], dtype=np.int32)
    ours, theirs = (each.compute_prompt_logprobs(logits_NV, token_ids_N, 0) for each in (sampler, plain))
    assert (ours.token_ids, ours.ranks) == (theirs.token_ids, theirs.ranks)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5)


def test_an_unknown_logprobs_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs_mode='odd' must be one of raw_logprobs"):
        make_sampler("odd")


def test_tokens_without_a_draw_may_be_known_before_drawn_ones_arrive() -> None:
    sampler = make_sampler()
    sampler.add_row(0, SamplingParams(temperature=0.0, bad_words_token_ids=[[7, 8, 9]]), [1], [], 0)
    sampler.put_tokens(0, 2, [8, 9])
    for token, position in ((7, 1), (8, 2)):
        sampler.append_tokens(np.array([0], np.int32), np.array([token], np.int32), np.array([position], np.int32))
        assert sampler.table.objects[0].output_token_ids == [7, 8, 9]
