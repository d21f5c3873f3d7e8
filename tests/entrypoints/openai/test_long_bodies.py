"""Long answers: the same JSON as in one go, in short pieces, between which others have their turn."""

import asyncio
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.http import long_bodies
from quire.entrypoints.http.long_bodies import AT_ONCE, LongBody, Made, encode, json_response, pieces_of


class Inner(msgspec.Struct):
    numbers: Any
    name: str = msgspec.field(name="renamed", default="x")
    left_out: Any = msgspec.UNSET


class Tagged(msgspec.Struct, tag_field="type", tag="kind"):
    rows: list[list[int]]


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=9)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=4), inner, max_size=5)
        | st.builds(Inner, inner)
        | st.lists(inner, max_size=5).map(lambda items: Made(items, lambda item: [item]))
    ),
    max_leaves=60,
)


@given(values, st.integers(1, 9))
def test_the_pieces_are_the_json_of_the_whole(value, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_bodies, "AT_ONCE", at_once)
        assert b"".join(pieces_of(value)) == encode(value)


@pytest.mark.parametrize("shape", [(0,), (3,), (3000,), (0, 4), (700, 40), (3, 20_000)])
def test_arrays_are_lists_of_numbers(shape):
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    whole = {"data": [Inner(numbers), Tagged([[1], [2, 3]])], 7: "seven"}
    assert b"".join(pieces_of(whole)) == encode(whole)
    assert msgspec.json.decode(encode(numbers)) == numbers.tolist()


def test_no_piece_is_long():
    entries = Made(range(5000), lambda item: {str(key): {"logprob": 0.5, "rank": key} for key in range(item % 40)})
    vectors = [np.ones((number % 7 * 500, 64), np.float32) for number in range(70)]
    value = {"data": vectors, "logprobs": entries, "ids": list(range(100_000)), "usage": Inner([1])}
    assert max(map(len, pieces_of(value))) < 24 * AT_ONCE < len(encode(value)) / 50


def test_others_have_their_turn_between_the_pieces():
    body, turns, sent = json_response([np.ones((300, 512))]), [0], list[tuple[int, bytes]]()

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append((turns[0], message.get("body", b"")))

    async def run() -> None:
        task = asyncio.create_task(others())
        await body({"type": "http"}, lambda: asyncio.sleep(0), send)
        task.cancel()

    asyncio.run(run())
    assert isinstance(body, LongBody)
    assert "content-length" not in body.headers
    assert b"".join(part for _, part in sent) == encode(np.ones((1, 300, 512)))
    moments = [turn for turn, part in sent if part]
    assert len(moments) > 10
    assert all(after > before for before, after in itertools.pairwise(moments[:-1]))


def test_the_loops_thread_rests_every_few_milliseconds(monkeypatch: pytest.MonkeyPatch):
    """So that other threads get the interpreter: with uvloop none had it for as long as such an answer was written."""
    now, rests, sent = [0.0], list[int](), list[int]()
    monkeypatch.setattr(long_bodies.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(long_bodies.time, "sleep", lambda seconds: rests.append(len(sent)))

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))
        now[0] += 0.001

    asyncio.run(json_response([np.ones((300, 512))])({"type": "http"}, lambda: asyncio.sleep(0), send))
    assert len(rests) >= len(sent) // 5 > 2
    assert all(after - before <= 5 for before, after in itertools.pairwise([0, *rests, len(sent)]))


def test_short_answers_are_sent_whole():
    response = json_response({"a": [1, 2]}, 201)
    assert (response.status_code, response.body, response.headers["content-length"]) == (201, b'{"a":[1,2]}', "11")


def test_what_has_no_form_in_json_is_an_error():
    with pytest.raises(NotImplementedError, match="object has no form in JSON"):
        encode(object())
