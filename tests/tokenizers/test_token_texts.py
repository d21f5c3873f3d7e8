"""The texts of a sequence's tokens join to its text, and their bytes to its bytes, also where a character is split."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tokenizers.detokenizer import detokenize
from quire.tokenizers.token_texts import CONTEXT_TOKENS, bytes_of, texts_at

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
EXACT = ["byte_level", "sentencepiece"]


def texts_of(tokenizer, ids, prompt=()):
    """The text of each token behind a prompt."""
    texts = []
    for index, token_id in enumerate(ids):
        before = [*prompt, *ids[:index]][-CONTEXT_TOKENS:]
        texts += texts_at(tokenizer, before, [token_id], keeps_broken=index > 0)
    return texts


@pytest.mark.parametrize("family", EXACT)
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_texts_and_bytes_of_any_text_join_to_it(tokenizers_by_family, family, text):
    tokenizer = tokenizers_by_family[family]
    ids = tokenizer.encode("x" + text, add_special_tokens=False)
    joined = "".join(texts_of(tokenizer, ids))
    assert joined.removeprefix(" ") == "x" + text
    assert b"".join(bytes_of(tokenizer, token_id, "") for token_id in ids).removeprefix(b" ") == ("x" + text).encode()


@pytest.mark.parametrize("family", EXACT)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_texts_of_random_token_ids_join_to_the_detokenized_text(tokenizers_by_family, family, seed):
    tokenizer = tokenizers_by_family[family]
    draw = random.Random(seed)
    prompt = [tokenizer.encode("x", add_special_tokens=False)[-1]] + [draw.randrange(len(tokenizer)) for _ in range(9)]
    ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 30))]
    ids += tokenizer.encode("z", add_special_tokens=False)[-1:]  # so that no character is left open at the end
    assert "".join(texts_of(tokenizer, ids, prompt)) == detokenize(tokenizer, prompt, ids, False)


def test_the_token_that_ends_a_split_character_has_it_and_those_before_have_no_text(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    ids = tokenizer.encode("x☃", add_special_tokens=False)[-3:]
    assert [bytes_of(tokenizer, token_id, "") for token_id in ids] == [b"\xe2", b"\x98", b"\x83"]
    assert texts_of(tokenizer, ids) == ["", "", "☃"]


def test_other_tokens_of_a_position_are_read_in_its_context_too(tokenizers_by_family):
    tokenizer = tokenizers_by_family["sentencepiece"]
    *begun, end = tokenizer.encode("x☃", add_special_tokens=False)[-3:]
    plain = tokenizer.encode("x", add_special_tokens=False)[-1]
    other_end = next(i for i in range(len(tokenizer)) if bytes_of(tokenizer, i, "") == b"\x84")
    assert texts_at(tokenizer, begun, [end, other_end, begun[0], plain]) == ["☃", "☄", "", "x"]
    assert texts_at(tokenizer, begun, [plain]) == ["\ufffdx"], "a broken character is part of the text"


def test_a_tokenizer_without_a_table_of_bytes_is_asked_for_the_text_in_context(tokenizers_by_family, monkeypatch):
    tokenizer = tokenizers_by_family["byte_level"]
    ids = tokenizer.encode("x☃ y", add_special_tokens=False)
    expected = texts_of(tokenizer, ids)
    monkeypatch.setattr(tokenizer, "token_bytes", None)
    assert texts_of(tokenizer, ids) == expected and "".join(expected) == "x☃ y"
