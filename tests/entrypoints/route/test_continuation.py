"""A stream that goes on elsewhere: the client gets each character once, whatever the pieces that either server sends."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.route.continuation import Continuation, DifferentText, data_of, is_done


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text_events(name: str, pieces: list[str], kind: str) -> list[bytes]:
    def choice(text: str) -> dict[str, Any]:
        return {"index": 0, "text": text} if kind == "text" else {"index": 0, "delta": {kind: text}}

    events = [event(id=name, created=5, choices=[choice(piece)]) for piece in pieces]
    end = choice("") | {"finish_reason": "stop"}
    usage = event(id=name, choices=[], usage={"total_tokens": 9})
    return [*events, event(id=name, choices=[end]), usage, b"data: [DONE]\n\n"]


def read(events: list[bytes], kind: str) -> tuple[str, int, int, set[str]]:
    """The text, the ends, the usages, the ids."""
    text, ends, usages, ids = "", 0, 0, set[str]()
    for each in events:
        if not is_done(each):
            chunk = json.loads(data_of(each))
            ids.add(chunk["id"])
            usages += chunk.get("usage") is not None
            for choice in chunk["choices"]:
                text += choice.get("text", "") if kind == "text" else choice.get("delta", {}).get(kind, "")
                ends += choice.get("finish_reason") is not None
    return text, ends, usages, ids


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", " "]), min_size=1, max_size=8),
    st.data(),
    st.sampled_from(["text", "content", "reasoning"]),
)
def test_what_was_sent_and_what_follows_are_the_whole(pieces: list[str], data: st.DataObject, kind: str) -> None:
    whole = "".join(pieces)
    first = text_events("one", pieces, kind)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)))))
    others = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    sent = first[: data.draw(st.integers(1, len(first) - 1))]
    rest = Continuation(sent)
    got = [*sent, *(kept for each in text_events("two", others, kind) if (kept := rest.filter(each)) is not None)]
    assert read(got, kind) == (whole, 1, 1, {"one"})
    assert is_done(got[-1])


def test_calls_of_tools_go_on_within_their_arguments() -> None:
    def call(text: str, **more: Any) -> bytes:
        function = {"arguments": text} | more
        return event(id="x", choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": function}]}}])

    rest = Continuation([call("", name="look"), call('{"a"')])
    assert rest.filter(call("", name="look")) is None
    assert json.loads(data_of(rest.filter(call('{"a": 1}')) or b""))["choices"][0]["delta"]["tool_calls"][0][
        "function"
    ] == {"arguments": ": 1}"}


def test_another_text_is_noticed() -> None:
    rest = Continuation(text_events("one", ["abc"], "text")[:1])
    with pytest.raises(DifferentText):
        rest.filter(event(id="two", choices=[{"index": 0, "text": "abd"}]))
    short = Continuation(text_events("one", ["abc"], "text")[:1])
    with pytest.raises(DifferentText, match="ended before"):
        short.filter(event(id="two", choices=[{"index": 0, "text": "ab", "finish_reason": "stop"}]))


def test_errors_and_comments_pass() -> None:
    rest = Continuation(text_events("one", ["abc"], "text"))
    assert rest.filter(b": waiting\n\n") == b": waiting\n\n"
    assert rest.filter(event(error={"message": "no"})) == event(error={"message": "no"})
