"""A row's reasoning ends where its budget is spent, and nowhere else is anything forced."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.sample.helpers import VOCAB, draw, make_plain_sampler, make_sampler, random_logits

from quire.kernels import ops
from quire.sample.thinking import ThinkingLimit
from quire.sampling_params import SamplingParams, Thinking

LENGTH = 14
PROMPT = [5, 6, 7]
TOKENS = range(3)
"""Few tokens, so that markers come by chance, too, whole and in part."""


@pytest.fixture(autouse=True, scope="module")
def references() -> None:
    """Both samplers draw with the same kernels, whatever other tests have chosen."""
    ops.select("reference")


def generate(kind: str, params: dict[str, Any], seed: int, output: list[int], length: int = LENGTH) -> list[int]:
    """What a row says that has said `output` already."""
    sampler, plain = make_sampler(), make_plain_sampler()
    (sampler if kind == "sampler" else plain).add_row(
        2, SamplingParams(allowed_token_ids=[*TOKENS, 90], max_tokens=99, **params), PROMPT, output, seed
    )
    said = list(output)
    while len(said) < length:
        logits = random_logits(1, seed=seed * 1000 + len(said))
        logits[0, 90] = -50.0
        position = len(PROMPT) + len(said)
        if kind == "sampler":
            token_ids = draw(sampler, logits, [2], [position]).token_ids
        else:
            token_ids = plain.sample(logits, np.array([2], np.int32), np.array([position], np.int32)).token_ids
        said.append(int(token_ids[0]))
    return said


def thinking_ends(said: list[int], thinking: Thinking) -> int | None:
    """How many tokens were said when the reasoning was over; None: it is not."""
    if thinking.start is not None and said[0] != thinking.start:
        return 0
    first = thinking.start is not None
    ends = (n for n in range(first + 1, len(said) + 1) if said[max(0, n - len(thinking.end)) : n] == thinking.end)
    return next(ends, None)


@settings(max_examples=60, deadline=None)
@given(
    end=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3),
    start=st.none() | st.just(90) | st.sampled_from(TOKENS),
    budget=st.integers(0, 9),
    seed=st.integers(0, 40),
    temperature=st.sampled_from([0.0, 1.0]),
    kind=st.sampled_from(["plain", "sampler"]),
)
def test_the_reasoning_ends_by_its_budget_and_nothing_else_changes(
    end: list[int], start: int | None, budget: int, seed: int, temperature: float, kind: str
) -> None:
    assume(start not in end)
    thinking = Thinking(end, start)
    free = {"temperature": temperature}
    before = [] if start != 90 else [90]
    unlimited = generate(kind, free, seed, before)
    said = generate(kind, {**free, "thinking": thinking, "thinking_token_budget": budget}, seed, before)
    allowed = budget + (start is not None)
    over = thinking_ends(unlimited, thinking)
    if over is not None and over <= allowed:
        assert said == unlimited
        return
    assert said[:allowed] == unlimited[:allowed]
    ended = thinking_ends(said, thinking)
    assert ended is not None and allowed < ended <= allowed + len(end)
    # The answer is drawn freely, from where the marker stands.
    assert said[ended:] == generate(kind, free, seed, said[:ended])[ended:]


CHANNEL, ANALYSIS, FINAL, CALL, MESSAGE, END, START, WORD = range(10, 18)
LEAD, CLOSE = [CHANNEL, ANALYSIS, MESSAGE], [END, START, CHANNEL]
ANSWERS = Thinking([CHANNEL, FINAL, MESSAGE], None, [*CLOSE, FINAL], LEAD, [[CHANNEL, FINAL], [CHANNEL, CALL]])
MAY_CALL = msgspec.structs.replace(ANSWERS, close=CLOSE)


@pytest.mark.parametrize(
    ("thinking", "budget", "wanted", "said"),
    [
        # Thoughts are cut, and the answer begins.
        (ANSWERS, 2, [*LEAD, *[WORD] * 9], [*LEAD, WORD, WORD, *CLOSE, FINAL, *[WORD] * 3]),
        (ANSWERS, 0, [*LEAD, *[WORD] * 9], [*LEAD, *CLOSE, FINAL, *[WORD] * 5]),
        # They end of themselves, or there are none: nothing is forced.
        (ANSWERS, 2, [*LEAD, WORD, *CLOSE, FINAL, MESSAGE, WORD, WORD], None),
        (ANSWERS, 2, [CHANNEL, FINAL, MESSAGE, *[WORD] * 9], None),
        (ANSWERS, 2, [CHANNEL, CALL, WORD, MESSAGE, *[WORD] * 9], None),
        (ANSWERS, 5, [*LEAD, WORD, *CLOSE, CALL, WORD, MESSAGE, WORD, WORD], None),
        # An end that has begun is not begun again.
        (ANSWERS, 2, [*LEAD, WORD, END, *[WORD] * 7], [*LEAD, WORD, *CLOSE, FINAL, *[WORD] * 4]),
        # With tools the model chooses what it goes on with.
        (MAY_CALL, 1, [*LEAD, *[WORD] * 4, CALL, MESSAGE, WORD], [*LEAD, WORD, *CLOSE, CALL, MESSAGE, WORD]),
        (
            MAY_CALL,
            1,
            [*LEAD, *[WORD] * 4, ANALYSIS, *[WORD] * 5],
            [*LEAD, WORD, *CLOSE, ANALYSIS, MESSAGE, *CLOSE, WORD],
        ),
    ],
)
def test_thoughts_on_a_channel_end_by_their_budget(
    thinking: Thinking, budget: int, wanted: list[int], said: list[int] | None
) -> None:
    output: list[int] = []
    limit = ThinkingLimit(thinking, budget, len(PROMPT), output)
    for token in wanted:
        forced = limit.forced(len(PROMPT) + len(output))
        output.append(token if forced is None else forced)
    assert output == (wanted if said is None else said)


@pytest.mark.parametrize("kind", ["plain", "sampler"])
@pytest.mark.parametrize("close", [[], [90, 1, 0]])
def test_both_samplers_force_what_closes_thoughts(kind: str, close: list[int]) -> None:
    thinking = Thinking([90, 1, 0], None, close, [2, 2], [[1, 1, 1, 1, 1]])
    said = generate(kind, {"thinking": thinking, "thinking_token_budget": 3, "temperature": 1.0}, 5, [2, 2])
    assert said[5:8] == [90, 1, 0] and 90 not in said[8:]


@pytest.mark.parametrize("kind", ["plain", "sampler"])
def test_a_row_that_comes_back_goes_on_with_what_is_left_of_its_budget(kind: str) -> None:
    params = {"thinking": Thinking([90]), "thinking_token_budget": 6, "temperature": 1.0, "logprobs": 0}
    whole = generate(kind, params, 3, [])
    assert whole.index(90) == 6
    for already in range(1, LENGTH):
        assert generate(kind, params, 3, whole[:already]) == whole


def test_the_marker_is_counted_and_its_logprob_is_the_models() -> None:
    sampler = make_sampler()
    thinking: dict[str, Any] = {"thinking": Thinking([90]), "thinking_token_budget": 0}
    params = SamplingParams(temperature=0.0, logprobs=0, presence_penalty=2.0, frequency_penalty=2.0, **thinking)
    sampler.add_row(0, params, PROMPT, [], 0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 90] = 3.0
    rows = np.array([0], np.int32)
    first = draw(sampler, logits, rows, [3])
    expected = float(torch.log_softmax(logits, -1)[0, 90])
    assert first.token_ids.tolist() == [90] and first.logprobs[0].logprobs[0] == [pytest.approx(expected)]
    second = draw(sampler, logits, rows, [4])
    assert second.token_ids[0] != 90, "the penalty knows the forced token"


def test_a_row_waits_for_its_tokens_only_where_its_reasoning_may_have_to_end() -> None:
    sampler = make_sampler()
    params = SamplingParams(temperature=0.0, thinking=Thinking([90]), thinking_token_budget=4, max_tokens=50)
    sampler.add_row(0, params, PROMPT, [], 0)
    rows = np.array([0], np.int32)

    def waits(position: int) -> bool:
        return sampler.needs_tokens(sampler.wanted(rows, np.array([position], np.int32)))

    assert [position for position in range(3, 12) if waits(position)] == [7, 8, 9, 10, 11]
    for position in range(3, 8):
        draw(sampler, random_logits(1, seed=position), [0], [position])
    assert sampler.table.objects[0].output_token_ids[-1] == 90
    draw(sampler, random_logits(1), [0], [8])
    assert sampler.is_plain(sampler.wanted(rows, np.array([9], np.int32))), "it is an ordinary row again"
