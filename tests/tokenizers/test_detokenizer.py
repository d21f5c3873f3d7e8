"""The pieces that a detokenizer streams are the text, at every split, for every family of tokenizer."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.tokenizers.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenize, make_detokenizer
from quire.tokenizers.interface import Tokenizer
from tokenizers import Tokenizer as Library

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
EXACT = ["byte_level", "sentencepiece"]
FAMILIES = ["byte_level", "sentencepiece", "unigram", "wordpiece"]


def splits(ids: list[int], random_seed: int) -> list[list[int]]:
    """The ids cut at random places into runs."""
    draw = random.Random(random_seed)
    runs: list[list[int]] = []
    while ids:
        count = draw.randint(1, 3)
        runs.append(ids[:count])
        ids = ids[count:]
    return runs


def streamed(tokenizer: Tokenizer, prompt: list[int], runs: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.feed(run) for run in runs), detokenizer.finish()]


@pytest.mark.parametrize("family", EXACT)
@given(text=TEXT, seed=st.integers(0, 10**6))
@example(text="\u2581", seed=0)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_whole_at_any_split(tokenizers_by_family, family, text, seed):
    tokenizer = tokenizers_by_family[family]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, [], splits(ids, seed), skip=False)  # a text may be a special token's
    if family == "sentencepiece":
        text = text.replace("\u2581", " ")  # its sign for a space: of the two only one can come back
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_pieces_of_random_token_ids_join_to_the_text_of_all(tokenizers_by_family, family, seed):
    tokenizer = tokenizers_by_family[family]
    draw = random.Random(seed)
    prompt = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(0, 9))]
    ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 30))]
    skip = draw.random() < 0.5
    whole = detokenize(tokenizer, prompt, ids, skip)
    assert "".join(streamed(tokenizer, prompt, splits(ids, seed), skip)) == whole
    assert "".join(streamed(tokenizer, prompt, [[token_id] for token_id in ids], skip)) == whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_text_of_an_output_equals_the_library_s_decoding(tokenizers_by_family, tokenizer_folders, family, skip):
    library = Library.from_file(str(tokenizer_folders[family] / "tokenizer.json"))
    tokenizer = tokenizers_by_family[family]
    ids = library.encode("hello world, this is a fox", add_special_tokens=True).ids
    assert detokenize(tokenizer, [], ids, skip) == library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_output_together_are_the_whole_text(tokenizers_by_family, family):
    tokenizer = tokenizers_by_family[family]
    ids = tokenizer.encode("hello world, the quick brown fox", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        prompt_text = tokenizer.decode(ids[:cut])
        assert prompt_text + detokenize(tokenizer, ids[:cut], ids[cut:]) == whole


@given(data=st.binary(min_size=1, max_size=24), seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_invalid_bytes_become_the_same_replacement_characters_at_any_split(tokenizers_by_family, data, seed):
    tokenizer = tokenizers_by_family["sentencepiece"]
    ids = [3 + byte for byte in data]
    expected = data.decode("utf-8", "replace").removeprefix(" ")
    assert "".join(streamed(tokenizer, [], splits(ids, seed))) == expected


def test_a_character_of_four_bytes_comes_out_with_its_last_byte(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    ids = [3 + byte for byte in "🙂".encode()]
    assert streamed(tokenizer, [1], [[token_id] for token_id in ids]) == ["", "", "", "🙂", ""]


def test_an_unfinished_character_shows_as_a_replacement_at_the_end(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    ids = [3 + byte for byte in "🙂".encode()[:3]]
    assert streamed(tokenizer, [1], [[token_id] for token_id in ids]) == ["", "", "", "\ufffd"]


def test_an_output_completes_the_character_that_the_prompt_began(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    first, *rest = [3 + byte for byte in "你".encode()]
    assert detokenize(tokenizer, [5, first], rest) == "你"


def test_a_character_that_only_the_prompt_began_is_not_the_output_s(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    first = 3 + "你".encode()[0]
    assert detokenize(tokenizer, [5, first], [3 + ord("a")]) == "a"


def test_special_tokens_are_skipped_or_shown(tokenizers_by_family):
    tokenizer = tokenizers_by_family["byte_level"]
    ids = tokenizer.encode("hello<|im_end|> world")
    assert detokenize(tokenizer, ids, ids, skip_special_tokens=True) == "hello world"
    assert detokenize(tokenizer, ids, ids, skip_special_tokens=False) == "hello<|im_end|> world"


def test_spaces_between_special_tokens_can_be_left_out(tokenizers_by_family):
    tokenizer = tokenizers_by_family["wordpiece"]
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    ids = [cls, sep, *tokenizer.encode("fox"), sep]
    assert detokenize(tokenizer, [], ids, False, True) == "[CLS] [SEP] fox [SEP]"
    assert detokenize(tokenizer, [], ids, False, False) == "[CLS][SEP] fox [SEP]"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizers_by_family):
    for family in EXACT:
        tokenizer = tokenizers_by_family[family]
        assert detokenize(tokenizer, [4], [len(tokenizer) + 7]) == ""


def test_the_window_serves_where_there_is_no_byte_table(tokenizers_by_family):
    assert isinstance(make_detokenizer(tokenizers_by_family["wordpiece"], []), WindowDetokenizer)
    assert isinstance(make_detokenizer(tokenizers_by_family["unigram"], []), ByteDetokenizer)


@given(text=TEXT, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_window_gives_the_same_pieces_as_the_table_when_text_is_valid(tokenizers_by_family, text, seed):
    tokenizer = tokenizers_by_family["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    window = WindowDetokenizer(tokenizer, [], True, True)
    table = make_detokenizer(tokenizer, [])
    runs = splits(ids, seed)
    if "\ufffd" not in text:
        assert [window.feed(run) for run in runs] == [table.feed(run) for run in runs]
    else:
        text_of_window = "".join(window.feed(run) for run in runs) + window.finish()
        assert text_of_window == text


def test_a_window_that_only_sees_replacements_holds_back_no_more_than_a_character(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    window = WindowDetokenizer(tokenizer, [], True, True)
    pieces = [window.feed([3 + 0xFF]) for _ in range(20)]
    assert "".join(pieces) == "\ufffd" * 16
    assert window.finish() == "\ufffd" * 4
