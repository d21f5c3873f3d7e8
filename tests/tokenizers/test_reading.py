"""Texts that a tokenizer cannot take are refused, whatever its library does about them."""

import pytest

import tokenizers
from quire.errors import RequestError
from quire.tokenizers.fast import FastTokenizer
from quire.tokenizers.interface import check_template_variables, reading
from tokenizers import Regex, models, pre_tokenizers

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
"""The end of the pattern that many models' tokenizers split texts by."""


class PanicException(BaseException):
    """As the native library's own."""


@pytest.mark.parametrize("error", [PanicException("retry-limit"), ValueError("bad"), RuntimeError("worse")])
def test_what_a_library_raises_about_a_text_is_the_request_s_error(error: BaseException) -> None:
    with pytest.raises(RequestError, match=f"cannot be tokenized: {error}"), reading("text"):
        raise error


def test_an_interrupt_is_no_error_of_the_text() -> None:
    with pytest.raises(KeyboardInterrupt), reading("text"):
        raise KeyboardInterrupt


def test_a_text_beyond_the_bound_is_not_read() -> None:
    refused = pytest.raises(RequestError, match="11 characters is not tokenized; with this model at most 10")
    with refused, reading("x" * 11, most=10):
        raise AssertionError


@pytest.fixture
def spaces(tmp_path):
    """A tokenizer whose pattern tries again at every space."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SPACES), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return FastTokenizer(tmp_path)


def test_a_panic_of_the_native_library_is_the_request_s_error(spaces) -> None:
    with pytest.raises(RequestError, match="cannot be tokenized"):
        spaces.encode(" " * 10_000_000)
    assert spaces.encode("a") == [0]


def test_a_tokenizer_s_bound_holds_for_one_text_for_several_and_for_pairs(spaces) -> None:
    spaces.max_text = 20
    for call in (
        lambda: spaces.encode(" " * 21),
        lambda: spaces.encode_batch(["a", " " * 21]),
        lambda: spaces.encode_pair("a", " " * 21),
    ):
        with pytest.raises(RequestError, match="21 characters"):
            call()


@pytest.mark.parametrize("name", ["conversation", "self", "tools", "messages", "tokenize", "chat_template"])
def test_a_template_s_variables_have_names_of_their_own(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}.* has a field of its own"):
        check_template_variables({name: 1, "enable_thinking": True})
    check_template_variables({"enable_thinking": True, "kwargs": 1})
