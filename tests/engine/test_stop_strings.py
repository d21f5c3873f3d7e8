"""Stop strings are found at the same place however the text is cut, and no part of one is ever shown."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.request_record import StopStrings

LETTERS = st.text("ab", min_size=0, max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def oracle(text: str, stops: list[str], include: bool) -> str:
    """One character at a time: the output when the first stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[:end] if include else text[: min(starts)]
    return text


@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(1, 4), max_size=24))
@settings(max_examples=500, deadline=None)
def test_the_shown_text_is_the_oracle_s_at_every_split(text, stops, include, cuts):
    checker = StopStrings(stops, include)
    seen, shown, checked, position = "", "", 0, 0
    lengths = iter(cuts)
    while position < len(text):
        step = next(lengths, 1)
        seen += text[position : position + step]
        position += step
        found = checker.find(seen, checked)
        if found is not None:
            shown += seen[len(shown) : found[1]]
            assert len(shown) == found[1], "text was shown that belongs to a stop string"
            break
        checked = len(seen)
        shown += seen[len(shown) : len(seen) - checker.held_back(seen)]
    else:
        shown += seen[len(shown) :]
    assert shown == oracle(text, stops, include)


def test_the_stop_string_that_ends_first_wins_and_then_the_longest():
    assert StopStrings(["world", "wor"], False).find("hello world", 0) == ("wor", 6)
    assert StopStrings(["rld", "world"], False).find("hello world", 0) == ("world", 6)
    assert StopStrings(["rld", "world"], True).find("hello world", 0) == ("world", 11)


def test_only_what_may_still_become_a_stop_string_is_held_back():
    checker = StopStrings(["</s>", "STOP"], False)
    assert checker.held_back("text </") == 2
    assert checker.held_back("text <") == 1
    assert checker.held_back("text >") == 0
    assert StopStrings(["</s>"], True).held_back("text </") == 0
