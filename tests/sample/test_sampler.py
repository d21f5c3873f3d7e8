"""The sampler against its oracle, and the promises that a batch makes to each of its rows."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles import sampler_reference as oracle
from tests.sample.helpers import VOCAB, add, draw, make_sampler, processed_probabilities, random_logits

from quire.sampling_params import SamplingParams


def random_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.9])}
    chance = lambda: rng.random() < 0.4  # noqa: E731
    if chance():
        params["top_k"] = rng.choice([1, 2, 5, 20, 96, 97, 500])
    if chance():
        params["top_p"] = rng.choice([0.01, 0.3, 0.9, 0.999])
    if chance():
        params["min_p"] = rng.choice([0.001, 0.05, 0.5, 1.0])
    if chance():
        params["presence_penalty"] = rng.uniform(-2, 2)
    if chance():
        params["frequency_penalty"] = rng.uniform(-2, 2)
    if chance():
        params["repetition_penalty"] = rng.uniform(0.5, 2)
    if chance():
        params["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-20, 20) for _ in range(4)}
    if chance():
        params["allowed_token_ids"] = rng.sample(range(VOCAB), 20)
    if chance():
        params["bad_words_token_ids"] = [[rng.randrange(VOCAB)], [rng.randrange(5), rng.randrange(VOCAB)], [1, 2, 3]]
    if chance():
        params["min_tokens"] = rng.randrange(8)
        params["eos_token_ids"] = [7]
        params["stop_token_ids"] = [11, 12]
    return params


@pytest.mark.parametrize("case", range(120))
def test_what_is_drawn_from_equals_the_oracle_for_random_parameters(case: int) -> None:
    rng = random.Random(case)
    params = random_params(rng)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    output = [rng.randrange(5) for _ in range(rng.randrange(8))]
    logits = random_logits(1, seed=case)[0]
    sampler = make_sampler(mode="processed_logprobs")
    add(sampler, 3, prompt=prompt, output=output, logprobs=-1, **params)
    position = len(prompt) + len(output)
    expected = oracle.probabilities(logits.numpy(), SamplingParams(**params), prompt, output)
    if params["temperature"] == 0:
        # The greedy distribution is reported before the choice; the choice itself is what must agree.
        token = draw(sampler, logits[None], [3], [position]).token_ids[0]
        assert expected[token] == 1
    else:
        seen = processed_probabilities(sampler, logits, 3, position)
        assert (seen > 0).tolist() == (expected > 0).tolist()
        np.testing.assert_allclose(seen, expected, rtol=2e-4, atol=1e-7)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    rng = random.Random(5)
    rows = list(range(24))
    all_params = [random_params(rng) for _ in rows]
    logits = random_logits(len(rows), seed=9)
    alone = []
    for row in rows:
        sampler = make_sampler()
        add(sampler, row, prompt=[1, 2, 3], output=[4, 1, 2], seed=row * 77, **all_params[row])
        alone.append(int(draw(sampler, logits[row : row + 1], [row], [6]).token_ids[0]))
    for order in (rows, rows[::-1], rng.sample(rows, 15), rng.sample(rows, 3)):
        sampler = make_sampler()
        for row in rows:
            add(sampler, row, prompt=[1, 2, 3], output=[4, 1, 2], seed=row * 77, **all_params[row])
        together = draw(sampler, logits[order], order, [6] * len(order)).token_ids
        assert together.tolist() == [alone[row] for row in order]


def test_a_row_that_is_added_again_with_its_output_continues_as_if_nothing_had_happened() -> None:
    params: dict[str, Any] = {
        "temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 6, "eos_token_ids": [3],
        "bad_words_token_ids": [[4, 5], [6, 7, 8]], "top_p": 0.95,
    }  # fmt: skip
    prompt, steps = [1, 2, 3], 14
    logits = random_logits(steps, seed=2, scale=1.0)

    def run(interrupted_at: int) -> list[int]:
        sampler, output = make_sampler(), []
        add(sampler, 0, prompt=prompt, seed=42, **params)
        for step in range(steps):
            row = 0 if step < interrupted_at else 9
            if step == interrupted_at:
                sampler.remove_row(0)
                add(sampler, 9, prompt=prompt, output=output, seed=42, **params)
            output.append(int(draw(sampler, logits[step : step + 1], [row], [3 + step]).token_ids[0]))
        return output

    uninterrupted = run(steps)
    assert len(set(uninterrupted)) > 4
    assert run(1) == run(7) == run(13) == uninterrupted


def test_seed_and_position_decide_the_token() -> None:
    logits = torch.zeros(1, 5000)
    sampler = make_sampler(vocab=5000)
    tokens: dict[tuple[int, int], int] = {}
    for seed in (0, 1, 2**63 + 5, -3):
        add(sampler, 0, seed=seed)
        for position in (1, 2, 900):
            tokens[seed, position] = int(draw(sampler, logits, [0], [position]).token_ids[0])
            assert draw(sampler, logits, [0], [position]).token_ids[0] == tokens[seed, position]
    assert len(set(tokens.values())) >= len(tokens) - 1


def test_temperature_zero_takes_the_largest_logit_also_beside_random_rows() -> None:
    logits = random_logits(3, seed=4)
    sampler = make_sampler()
    add(sampler, 0, temperature=0.0)
    add(sampler, 1, temperature=1.0, seed=3)
    add(sampler, 2, temperature=0.0, top_k=5, presence_penalty=0.0)
    tokens = draw(sampler, logits, [0, 1, 2], [1, 1, 1]).token_ids
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


@pytest.mark.parametrize("position", [4, 5])
def test_min_tokens_hides_stopping_tokens_until_enough_were_generated(position: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 11], logits[0, 20] = 9, 8, 7
    sampler = make_sampler()
    add(sampler, 0, prompt=[1, 2], temperature=0.0, min_tokens=3, eos_token_ids=[7], stop_token_ids=[11])
    assert draw(sampler, logits, [0], [position]).token_ids[0] == (20 if position < 5 else 7)


def test_a_row_leaves_the_slow_path_when_min_tokens_is_reached() -> None:
    sampler = make_sampler()
    add(sampler, 0, prompt=[1], temperature=0.0, min_tokens=1, eos_token_ids=[7])
    logits = random_logits(1)
    draw(sampler, logits, [0], [1])
    draw(sampler, logits, [0], [2])
    assert sampler.table.features_R[0] == 0
    assert not sampler.table.objects


def test_a_bad_word_of_several_tokens_is_hidden_only_after_its_beginning() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 5, 4
    sampler = make_sampler()
    add(sampler, 0, prompt=[6, 7], output=[6], temperature=0.0, bad_words_token_ids=[[6, 7, 8]])
    assert draw(sampler, logits, [0], [3]).token_ids[0] == 8  # 6 7 stands in the prompt, not in the output
    add(sampler, 1, prompt=[1], output=[6, 7], temperature=0.0, bad_words_token_ids=[[6, 7, 8]])
    assert draw(sampler, logits, [1], [3]).token_ids[0] == 9


def test_constraints_that_forbid_everything_end_only_their_row() -> None:
    sampler = make_sampler()
    add(sampler, 0, temperature=0.0, allowed_token_ids=[4], bad_words_token_ids=[[4]])
    add(sampler, 1, temperature=0.0)
    logits = random_logits(2)
    result = draw(sampler, logits, [0, 1], [1, 1])
    assert "allowed_token_ids" in result.errors[0]
    assert list(result.errors) == [0]
    assert result.token_ids[1] == logits[1].argmax()


def test_raw_logprobs_are_those_of_the_model_whatever_the_row_does_to_its_logits() -> None:
    logits = random_logits(2, seed=6)
    sampler = make_sampler()
    add(sampler, 0, temperature=0.5, top_k=3, logit_bias={5: 50.0}, logprobs=4)
    add(sampler, 1, temperature=0.0, logprobs=0)
    result = draw(sampler, logits, [0, 1], [1, 1])
    expected = oracle.log_softmax(logits[0].numpy())
    order = np.argsort(-expected)
    entry = result.logprobs[0]
    assert entry.token_ids[0] == [5, *order[:4].tolist()]
    np.testing.assert_allclose(entry.logprobs[0], expected[entry.token_ids[0]], atol=1e-5)
    assert entry.ranks == [1 + order.tolist().index(5)]
    assert result.logprobs[1].token_ids == [[int(logits[1].argmax())]]
    assert result.logprobs[1].ranks == [1]


def test_processed_logprobs_of_a_greedy_row_have_no_temperature() -> None:
    logits = random_logits(1, seed=6)
    sampler = make_sampler(mode="processed_logprobs")
    add(sampler, 0, temperature=0.0, logprobs=-1, logit_bias={5: 3.0})
    entry = draw(sampler, logits, [0], [1]).logprobs[0]
    edited = logits[0].numpy().copy()
    edited[5] += 3
    np.testing.assert_allclose(entry.logprobs[0], oracle.log_softmax(edited)[entry.token_ids[0]], atol=1e-5)
    assert len(entry.token_ids[0]) == VOCAB + 1


def test_raw_logits_can_be_asked_for() -> None:
    logits = random_logits(1)
    sampler = make_sampler(mode="raw_logits")
    add(sampler, 0, temperature=0.0, logprobs=2)
    entry = draw(sampler, logits, [0], [1]).logprobs[0]
    assert entry.logprobs[0][1:] == pytest.approx(torch.topk(logits[0], 2).values.tolist())


def test_prompt_logprobs_have_the_rows_own_number_of_alternatives() -> None:
    sampler = make_sampler()
    add(sampler, 0, prompt=[1, 2, 3], prompt_logprobs=2)
    logits = random_logits(2, seed=3)
    entry = sampler.compute_prompt_logprobs(logits, np.array([2, 3], dtype=np.int32), 0)
    for position, token in enumerate([2, 3]):
        expected = oracle.log_softmax(logits[position].numpy())
        assert entry.token_ids[position] == [token, *np.argsort(-expected)[:2].tolist()]
        assert entry.logprobs[position][0] == pytest.approx(expected[token], abs=1e-5)
        assert entry.ranks[position] == 1 + int((expected > expected[token]).sum())


def test_an_empty_batch_has_no_tokens() -> None:
    result = draw(make_sampler(), torch.zeros(0, VOCAB), [], [])
    assert result.token_ids.tolist() == []


def test_a_removed_row_leaves_nothing_behind() -> None:
    sampler = make_sampler()
    add(sampler, 0, temperature=1.0, frequency_penalty=1.0, allowed_token_ids=[1], logprobs=3)
    sampler.remove_row(0)
    sampler.remove_row(0)
    assert not sampler.table.objects
    add(sampler, 0, temperature=0.0)
    logits = random_logits(1)
    result = draw(sampler, logits, [0], [1])
    assert result.token_ids[0] == logits[0].argmax()
    assert not result.logprobs


def test_an_unknown_logprobs_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs_mode='odd' must be one of raw_logprobs"):
        make_sampler(mode="odd")


def test_infinite_logits_of_hidden_tokens_have_minus_infinite_logprobs() -> None:
    sampler = make_sampler(mode="processed_logprobs")
    add(sampler, 0, temperature=1.0, top_k=1, logprobs=2)
    entry = draw(sampler, random_logits(1), [0], [1]).logprobs[0]
    assert entry.logprobs[0][1] == pytest.approx(0.0, abs=1e-6)
    assert entry.logprobs[0][2] == -math.inf
