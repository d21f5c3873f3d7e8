"""Guesses from all texts at hand against a search that looks at every place of every text."""

import collections
import random
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config.speculative import SpeculativeConfig
from quire.core import suffix_texts, token_history
from quire.core.drafting import Drafting
from quire.core.proposers import RowGuesses
from quire.core.suffix_texts import MIN_MATCH, SharedTexts, SuffixProposer

NOTHING = object()


def search(
    own: list[int], texts: list[list[int]], config: SpeculativeConfig, most: int
) -> tuple[list[int], list[float]]:
    """The definition, slowly: all places with the longest match, and their majority from token to token."""
    places: list[tuple[int, list[int], int]] = []
    for text in (own, *reversed(texts)):
        for place in range(len(text) - (text is own), 0, -1):
            length = 0
            limit = min(place, len(own), config.suffix_decoding_max_tree_depth)
            while length < limit and text[place - 1 - length] == own[-1 - length]:
                length += 1
            places.append((length, text, place))
    longest = max((length for length, _, _ in places), default=0)
    if longest < MIN_MATCH:
        return [], []
    alive = [(text, place) for length, text, place in places if length == longest]
    guess: list[int] = []
    shares: list[float] = []
    chance = 1.0
    for offset in range(min(most, max(1, int(longest * config.suffix_decoding_max_spec_factor)))):
        nexts: list[Any] = []
        for text, place in alive:
            known = [*own, *guess] if text is own else text
            nexts.append(known[place + offset] if place + offset < len(known) else NOTHING)
        token, count = collections.Counter(nexts).most_common(1)[0]
        chance *= count / len(alive)
        if token is NOTHING or chance < config.suffix_decoding_min_token_prob:
            break
        guess.append(token)
        shares.append(count / len(alive))
        alive = [at for at, following in zip(alive, nexts, strict=True) if following == token]
    return guess, shares


@given(
    own=st.lists(st.integers(0, 2), max_size=60),
    texts=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=30), max_size=5),
    depth=st.integers(2, 12),
    most=st.integers(1, 9),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    least=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_a_guess_is_the_majority_of_all_places_with_the_longest_match(
    own: list[int], texts: list[list[int]], depth: int, most: int, factor: float, least: float
) -> None:
    config = SpeculativeConfig(
        method="suffix",
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=least,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_history, "MAX_PLACES", 10_000)
        shared = SharedTexts(100, depth)
        for text in texts:
            shared.add(text)
        proposer = SuffixProposer(config, shared, 0)
        for begin in range(0, len(own), 7):
            proposer.extend(own[begin : begin + 7])
        assert (proposer.propose(most), proposer.shares) == search(own, texts, config, most)


def proposer_of(shared: SharedTexts | None, own: list[int], **settings: Any) -> SuffixProposer:
    proposer = SuffixProposer(SpeculativeConfig(method="suffix", **settings), shared, 0)
    proposer.extend(own)
    return proposer


def test_what_another_request_has_answered_is_a_guess_and_its_prompt_is_not() -> None:
    shared = SharedTexts(10, 24)
    other = SuffixProposer(SpeculativeConfig(method="suffix"), shared, 3)
    other.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert proposer_of(shared, [4, 5, 6]).propose(8) == []
    other.end()
    assert proposer_of(shared, [4, 5, 6]).propose(8) == [7, 8]
    assert proposer_of(shared, [1, 2]).propose(8) == []
    assert proposer_of(None, [4, 5, 6]).propose(8) == []


def test_texts_that_help_outlive_others_and_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_texts, "MOST_SHARED", 1 << 10)
    shared = SharedTexts(1000, 24)
    shared.add([1, 2, 3, 4, 5, 6])
    shared.add([11, 12, 13, 14, 15, 16])
    rng = random.Random(0)
    for number in range(200):
        assert proposer_of(shared, [1, 2, 3]).propose(3) == [4, 5, 6], number
        shared.add([rng.randrange(100, 1000) for _ in range(50)])
    assert proposer_of(shared, [11, 12, 13]).propose(3) == []
    assert sum(generation.history.count for generation in shared.generations) <= 2 << 10
    few = SharedTexts(4, 24)
    for number in range(40):
        few.add([number, number + 1, number + 2])
        assert sum(len(generation.starts) for generation in few.generations) <= 4
    none = SharedTexts(0, 24)
    none.add([1, 2, 3, 4])
    assert proposer_of(none, [1, 2]).propose(2) == []


class Claiming:
    """Guesses one token, and says how likely it is."""

    def __init__(self, share: float) -> None:
        self.shares = [share]

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def propose(self, most: int) -> list[int]:
        return [1]

    def end(self) -> None: ...


@pytest.mark.parametrize(("share", "truth"), [(0.5, 0.5), (0.5, 0.25), (1.0, 0.8), (0.9, 0.0)])
def test_what_a_proposer_says_of_its_guesses_is_put_right_by_what_comes(share: float, truth: float) -> None:
    guesses, rng, said = RowGuesses(Claiming(share), 4), random.Random(1), list[float]()
    for _ in range(3000):
        guesses.propose()
        said.append(guesses.shares[0] * guesses.chance)
        guesses.take([int(rng.random() < truth)])
    assert sum(said[200:]) / len(said[200:]) == pytest.approx(truth, abs=0.06)


def test_an_answer_of_a_request_speeds_up_the_next_one_unless_it_has_a_salt() -> None:
    steps: list[int] = []
    for salt in (None, "mine"):
        harness = SchedulerHarness(max_model_len=100)
        harness.scheduler.speculate(
            SpeculativeConfig(method="suffix", num_speculative_tokens=6, enable_adaptive_verification=False)
        )
        assert isinstance(harness.scheduler.drafting, Drafting)
        for name in "ab":
            before = len(harness.steps)
            harness.add(name, [1, 2, 3], seed=5, max_tokens=40, cache_salt=salt)
            harness.run()
            steps.append(len(harness.steps) - before)
    assert steps[1] < 0.5 * steps[0]
    assert steps[3] == steps[2] == steps[0]
