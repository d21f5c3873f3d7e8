"""Texts that a tokenizer cannot take are refused, whatever its library does about them."""

import queue
import threading
import time

import pytest
from tests.oracles.tiny_models import write_tiny_tokenizer

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


def test_other_threads_run_while_a_text_is_tokenized(tmp_path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer, text, around = (
        FastTokenizer(tmp_path),
        "the quick brown fox jumps over the lazy dog " * 5000,
        list[float](),
    )
    ping, pong = queue.SimpleQueue[bool](), queue.SimpleQueue[bool]()

    def work() -> None:
        around.append(time.perf_counter())
        tokenizer.encode(text)
        around.append(time.perf_counter())

    threading.Thread(target=lambda: [pong.put(True) for _ in iter(ping.get, False)]).start()
    tenths = set[int]()
    for _ in range(20):  # of which one is enough: an idle core may come late
        around.clear()
        worker, rounds = threading.Thread(target=work), list[float]()
        worker.start()
        while worker.is_alive():
            ping.put(True)
            pong.get()
            rounds.append(time.perf_counter())
        begin, end = around
        tenths = {int(10 * (each - begin) / (end - begin)) for each in rounds if begin < each < end}
        if len(tenths) > 5:
            break
    ping.put(False)
    assert len(tenths) > 5, "two other threads did not get on with one another all the while"
