"""Pieces of an answer as a response's output: items, and the events of a stream that tell them.

An item ends where a piece of another kind begins. Knows pieces, items and events; knows nothing of requests.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.openai.protocol import TokenLogprob
from quire.entrypoints.responses import protocol
from quire.parsers.pieces import Piece

_NAMES = {"content": "output_text", "reasoning": "reasoning_text", "arguments": "function_call_arguments"}


def error_event(error: HTTPError) -> bytes:
    """An error in a stream whose status has already been sent, and whose response could not be kept."""
    fields = {"message": error.detail.message, "code": error.detail.code, "param": error.detail.param}
    return b"event: error\ndata: %b\n\n" % encode({"type": "error", **fields, "sequence_number": 0})


class HasOutput(Protocol):
    """A response, of this protocol or of another whose output has the same items."""

    output: list[protocol.OutputItem]


class OpenItem(msgspec.Struct):
    """Where a writer stands: the number of its next event, and the item that is open, if there is one."""

    number: int
    kind: str | None = None
    item: protocol.OutputItem | None = None
    head: bytes = b""
    text: str = ""


class EventWriter:
    """Puts a response's output together, and writes its events. An event's number is its place in the stream.

    Args:
        response: gets an item when it is complete.
        call_id: the id of a call, from its function's name and its index.

    Attributes:
        kind: of the pieces that go into the open item; None where none is open.
    """

    def __init__(self, response: HasOutput, call_id: Callable[[str, int, str], str]) -> None:
        self._response = response
        self._call_id = call_id
        self._number = 0
        self.kind: str | None = None
        self._item: protocol.OutputItem
        self._head = b""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def state(self) -> OpenItem:
        """What another writer needs to go on from here."""
        if self.kind is None:
            return OpenItem(self._number)
        return OpenItem(self._number, self.kind, self._item, self._head, "".join(self._texts))

    def restore(self, response: HasOutput, state: OpenItem) -> None:
        """Go on where another writer stood."""
        self._response, self._number, self.kind = response, state.number, state.kind
        if state.item is not None:
            self._item, self._head, self._texts = state.item, state.head, [state.text]

    def lifecycle(self, name: str) -> bytes:
        """An event that carries the response as it is now."""
        return self._event(f"response.{name}", response=self._response)

    def write(self, piece: Piece, logprobs: Sequence[TokenLogprob] = ()) -> list[bytes]:
        """The events that a piece makes; `logprobs` are of the tokens of its text."""
        if piece.kind == "call":
            return [*self.close("completed"), *self._open("arguments", piece)]
        events: list[bytes] = []
        if piece.kind != self.kind:
            events = [*self.close("completed"), *self._open(piece.kind, piece)]
        events.append(self.write_delta(piece.text, logprobs))
        return events

    def close(self, status: str) -> list[bytes]:
        """End the open item, if there is one."""
        if self.kind is None:
            return []
        text, item, name = "".join(self._texts), self._item, f"response.{_NAMES[self.kind]}.done"
        item.status = status
        match item:
            case protocol.FunctionCallItem():
                item.arguments = text
                events = [self._of_item(name, name=item.name, arguments=text)]
            case protocol.ReasoningItem():
                item.content = [protocol.ReasoningText(text)]
                events = [self._of_part(name, text=text), self._part("done", item.content[0])]
            case protocol.MessageItem():
                item.content = [protocol.OutputText(text, logprobs=self._logprobs)]
                done = self._of_part(name, text=text, logprobs=self._logprobs)
                events = [done, self._part("done", item.content[0])]
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self._response.output.append(item)
        self.kind, self._texts, self._logprobs = None, [], []
        return events

    def write_nothing(self) -> list[bytes]:
        """The message of an answer without a word: clients count on one."""
        return [*self._open("content", Piece("content", "")), *self.close("completed")]

    def _open(self, kind: str, piece: Piece) -> list[bytes]:
        part = None
        if kind == "arguments":
            call_id = self._call_id(piece.text, piece.index, piece.id)
            self._item = protocol.FunctionCallItem(protocol.new_id("function_call"), call_id, piece.text)
        elif kind == "reasoning":
            self._item, part = protocol.ReasoningItem(protocol.new_id("reasoning")), protocol.ReasoningText()
        else:
            self._item, part = protocol.MessageItem(protocol.new_id("message")), protocol.OutputText()
        self.kind = kind
        place: dict[str, Any] = {"item_id": self._item.id, "output_index": self._index}
        name = f"response.{_NAMES[kind]}.delta"
        fields = encode({"type": name, **place} | ({"content_index": 0} if part is not None else {}))
        self._head = b"event: %b\ndata: %b" % (name.encode(), fields[:-1])
        opened = self._event("response.output_item.added", output_index=self._index, item=self._item)
        return [opened] if part is None else [opened, self._part("added", part)]

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self._response.output)

    def write_delta(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """More text of the open item: the common event, of which only the text is encoded."""
        self._texts.append(text)
        self._logprobs += logprobs
        told = b',"logprobs":' + (encode(logprobs) if logprobs else b"[]") if self.kind == "content" else b""
        tail = b',"sequence_number":%d}\n\n' % self._number
        self._number += 1
        return b"".join((self._head, b',"delta":', encode(text), told, tail))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _part(self, happened: str, part: protocol.OutputText | protocol.ReasoningText) -> bytes:
        return self._of_part(f"response.content_part.{happened}", part=part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = encode({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
