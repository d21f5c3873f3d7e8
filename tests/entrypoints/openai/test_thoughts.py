"""Reasoning is counted by the ids of its markers, however the answer's tokens come."""

from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.openai.answers import answer_reader, reasoning_count
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.parsers.choice import choose_formats
from quire.parsers.formats import Reasoning

START, END = 1, 2
FORMAT = Reasoning(("<think>",), ("</think>",))


class Vocabulary:
    """A tokenizer that knows some markers."""

    def __init__(self, **ids):
        self.ids = ids

    def token_to_id(self, token):
        return self.ids.get({"<think>": "think", "</think>": "end"}.get(token, ""))


class HidingVocabulary(Vocabulary):
    """A tokenizer whose markers are special, though no file lists them by name."""

    special_ids = frozenset({START, END})
    all_special_tokens: tuple[str, ...] = ()

    def decode(self, token_ids, skip_special_tokens):
        return ""


BOTH = Vocabulary(think=START, end=END)


def expected(token_ids, inside):
    """By the definition: between the start marker (or the answer's beginning) and the first end marker after it."""
    begin = 0 if inside else next((at for at, token in enumerate(token_ids) if token == START), len(token_ids))
    rest = token_ids[begin:]
    return len([token for token in rest[: rest.index(END) if END in rest else len(rest)] if token != START])


@given(
    answers=st.lists(st.lists(st.integers(1, 5), max_size=12), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    inside=st.booleans(),
)
def test_tokens_from_one_marker_to_the_other_are_counted(answers, cuts, inside):
    count = reasoning_count(FORMAT, inside, BOTH)
    assert count is not None
    for step in cuts:
        for index, token_ids in enumerate(answers):
            count.add(index, token_ids[:step])
    fed = [[token for step in cuts for token in answer[:step]] for answer in answers]
    assert count.total == sum(expected(token_ids, inside) for token_ids in fed)


class Pieces:
    """A tokenizer whose markers are three tokens, the first of them special."""

    special_ids = frozenset((7, 8))

    def token_to_id(self, token):
        return None

    def encode(self, text, add_special_tokens=True):
        return [8 if "/" in text else 7, 9, 6]


@given(cuts=st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_markers_of_several_tokens_are_counted_wherever_the_answer_is_cut(cuts):
    answer = [1, 7, 9, 5, 7, 9, 6, 2, 2, 8, 9, 2, 8, 9, 6, 3, 7, 9, 6, 3]  # 7, 9, 6 begins it; 8, 9, 6 ends it
    count = reasoning_count(FORMAT, False, Pieces())
    assert count is not None
    rest = list(answer)
    for step in cuts:
        count.add(0, rest[:step])
        del rest[:step]
    assert count.total == len(answer[7:12])


def test_every_part_that_is_reasoning_is_counted_where_a_model_may_reason_again():
    answer = [5, START, 5, 5, END, 5, START, 5, END, 5]
    for again, total in ((("<think>",), 3), ((), 2)):
        count = reasoning_count(Reasoning(("<think>",), ("</think>",), again=again), False, BOTH)
        assert count is not None
        count.add(0, answer)
        assert count.total == total


def test_a_start_marker_that_the_model_repeats_is_not_counted():
    count = reasoning_count(FORMAT, True, BOTH)
    assert count is not None
    count.add(0, [START, 5, 5, END, 5])
    assert count.total == 2


def test_what_cannot_be_told_apart_is_not_counted():
    assert reasoning_count(None, None, BOTH) is None
    assert reasoning_count(FORMAT, True, Vocabulary(think=START)) is None
    assert reasoning_count(FORMAT, False, Vocabulary(end=END)) is None
    assert reasoning_count(FORMAT, True, Vocabulary(end=END)) is not None
    assert reasoning_count(Reasoning(("<think>",), ("</think>",), implied=True), None, Vocabulary(end=END)) is not None


def test_markers_that_are_special_tokens_stay_in_the_text_that_is_read():
    formats = choose_formats("qwen3", "none", None)
    request = ChatCompletionRequest(messages=[])
    for vocabulary, keeps in (
        (HidingVocabulary(think=START, end=END), True),
        (HidingVocabulary(think=7, end=8), False),
    ):
        reader = answer_reader(formats, request, vocabulary, [5])
        assert reader is not None and reader.keeps_special_tokens is keeps


def test_markers_are_told_from_content_though_they_are_not_counted():
    count = reasoning_count(FORMAT, False, BOTH)
    assert count is not None
    assert [count.add(0, [token]) for token in (START, 5, 5, END, 5)] == [1, 1, 1, 1, 0]
    assert count.total == 2
