"""Pieces as items and events: however an answer is cut, the stream adds up to the same output."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.protocol import TokenLogprob
from quire.entrypoints.responses.events import EventWriter, error_event
from quire.entrypoints.responses.protocol import (
    FunctionCallItem,
    MessageItem,
    ReasoningConfig,
    ReasoningItem,
    ResponseObject,
    TextConfig,
)
from quire.parsers.pieces import Piece

TEXTS = st.text(min_size=1, max_size=6)


@st.composite
def answers(draw):
    """Pieces as a parser gives them: a call's name, then its arguments."""
    pieces, calls = [], 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=6)):
        texts = draw(st.lists(TEXTS, min_size=0 if kind == "call" else 1, max_size=4))
        if kind == "call":
            pieces.append(Piece("call", f"f{calls}", calls))
            pieces += [Piece("arguments", text, calls) for text in texts]
            calls += 1
        else:
            pieces += [Piece(kind, text) for text in texts]
    return pieces


def writer():
    response = ResponseObject(id="r", created_at=0, model="m", reasoning=ReasoningConfig(), text=TextConfig())
    return response, EventWriter(response, lambda name, index, _: f"call_{name}_{index}")


def parsed(stream):
    """The events of a stream."""
    blocks = b"".join(stream).decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {event['type']}" for event in events]
    return events


@given(answers(), st.sampled_from(["completed", "incomplete"]))
def test_a_stream_adds_up_to_the_output(pieces, status):
    response, events = writer()
    stream = [events.lifecycle("created")]
    for piece in pieces:
        stream += events.write(piece)
    stream += [*events.close(status), *events.close(status), events.lifecycle("completed")]
    told = parsed(stream)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    items = told[-1]["response"]["output"]
    assert items == json.loads(msgspec.json.encode(response.output))
    built = []
    for event in told[1:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            built.append({**event["item"], "text": ""})
        elif kind.endswith(".delta"):
            built[event["output_index"]]["text"] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"] == items[event["output_index"]]
    assert len(built) == len(items)
    for shown, item in zip(built, items, strict=True):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert shown["text"] == text and shown["id"] == item["id"]
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [status] * bool(items)
    for kind, name in (("content", "message"), ("reasoning", "reasoning")):
        whole = "".join(piece.text for piece in pieces if piece.kind == kind)
        assert whole == "".join(item["content"][0]["text"] for item in items if item["type"] == name)
    names = [piece.text for piece in pieces if piece.kind == "call"]
    assert names == [item["name"] for item in items if item["type"] == "function_call"]


def test_an_item_ends_where_another_kind_begins():
    response, events = writer()
    for piece in (Piece("reasoning", "hm"), Piece("content", "so"), Piece("call", "f"), Piece("call", "g", 1)):
        events.write(piece)
    events.close("completed")
    thought, said, first, second = response.output
    assert isinstance(thought, ReasoningItem) and isinstance(said, MessageItem)
    assert isinstance(first, FunctionCallItem) and isinstance(second, FunctionCallItem)
    assert (first.call_id, second.call_id, second.arguments) == ("call_f_0", "call_g_1", "")
    assert len({item.id for item in response.output}) == 4


def test_logprobs_go_with_their_text():
    response, events = writer()
    entries = [TokenLogprob(word, -0.5, None, []) for word in "ab"]
    stream = events.write(Piece("content", "a"), entries[:1]) + events.write(Piece("content", "b"), entries[1:])
    stream += events.close("completed")
    told = [[entry["token"] for entry in event["logprobs"]] for event in parsed(stream) if "logprobs" in event]
    assert told == [["a"], ["b"], ["a", "b"]]
    (item,) = response.output
    assert isinstance(item, MessageItem) and item.content[0].logprobs == entries


def test_an_answer_without_a_word_is_an_empty_message():
    response, events = writer()
    kinds = [event["type"].removeprefix("response.") for event in parsed(events.write_nothing())]
    assert kinds == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    (item,) = response.output
    assert isinstance(item, MessageItem) and item.content[0].text == "" and item.status == "completed"


def test_an_error_behind_the_status_is_an_event():
    (event,) = parsed([error_event(bad_request("wrong", "input", "odd"))])
    assert event == {"type": "error", "message": "wrong", "param": "input", "code": "odd", "sequence_number": 0}
