"""A token history against a search that looks at every place."""

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from quire.core.token_history import MAX_PLACES, TokenHistory


def search(tokens: list[int], min_match: int, max_match: int, most: int) -> list[int]:
    """What followed the best of the last places: slow and obvious."""
    end = len(tokens)
    places = [
        place
        for place in range(end - 1, min_match - 1, -1)
        if tokens[place - min_match : place] == tokens[end - min_match :]
    ]
    best, longest = 0, 0
    for place in places[:MAX_PLACES]:
        length = 0
        while length < min(place, max_match) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    copied = list(tokens)
    for offset in range(most if best else 0):
        copied.append(copied[best + offset])
    return copied[end:]


@given(
    tokens=st.lists(st.integers(0, 3), max_size=120),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    min_match=st.integers(1, 4),
    extra=st.integers(0, 6),
    most=st.integers(1, 9),
)
@settings(max_examples=300, deadline=None)
def test_the_continuation_is_that_of_the_longest_match_among_the_last_places(
    tokens: list[int], cuts: list[int], min_match: int, extra: int, most: int
) -> None:
    history = TokenHistory(min_match, min_match + extra)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, end in itertools.pairwise(bounds):
        history.extend(tokens[begin:end])
        # Runs that only share a hash take one of the places that are looked at: with few tokens there are none.
        assert history.continue_end(most) == search(tokens[:end], min_match, min_match + extra, most)


@pytest.mark.parametrize("step", [1, 3, 50, 5000])
def test_a_history_is_the_same_however_its_tokens_come(step: int) -> None:
    tokens = [random.Random(5).randrange(400) for _ in range(2500)]
    tokens += tokens[100:180]
    history = TokenHistory(2, 16)
    for begin in range(0, len(tokens), step):
        history.extend(tokens[begin : begin + step])
    assert history.count == len(tokens)
    assert history.continue_end(20) == tokens[180:200]


def test_a_text_that_goes_in_circles_is_guessed_to_go_on_so() -> None:
    history = TokenHistory(2, 16)
    history.extend([9, 8, 1, 2, 3, 1, 2, 3])
    assert history.continue_end(7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_without_an_earlier_place() -> None:
    history = TokenHistory(2, 16)
    assert history.continue_end(4) == []
    history.extend([1, 2])
    assert history.continue_end(4) == []
    history.extend([3, 4])
    assert history.continue_end(4) == []
