"""Pieces of an answer as Anthropic's content blocks: whole, or as the events of a stream.

A block ends where a piece of another kind begins. Knows pieces and events; knows nothing of requests.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from quire.entrypoints.anthropic.protocol import Block, TextBlock, ThinkingBlock, ToolUseBlock
from quire.parsers.pieces import Piece

_encode = msgspec.json.Encoder().encode
CallId = Callable[[str, int], str]
"""The id of a call, from its function's name and its index."""

_DELTAS = {
    "content": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "arguments": b'{"type":"input_json_delta","partial_json":',
}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _signature(thinking: str) -> str:
    return hashlib.sha256(thinking.encode()).hexdigest()


def _begins_block(piece: Piece, kind: str | None) -> bool:
    """Whether a piece cannot go into the open block, whose pieces are of `kind`."""
    return piece.kind == "call" or piece.kind != kind


def _opened(piece: Piece, call_id: CallId) -> tuple[str, Block]:
    """The kind of the pieces that a new block takes, and the block, still empty."""
    if piece.kind == "call":
        return "arguments", ToolUseBlock(call_id(piece.text, piece.index), piece.text)
    return piece.kind, ThinkingBlock() if piece.kind == "reasoning" else TextBlock()


def whole_blocks(pieces: Iterable[Piece], call_id: CallId) -> list[Block]:
    """The blocks of a whole answer."""
    kind: str | None = None
    blocks: list[Block] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if _begins_block(piece, kind):
            kind, block = _opened(piece, call_id)
            blocks.append(block)
            texts.append([])
        if piece.kind != "call":
            texts[-1].append(piece.text)
    for block, parts in zip(blocks, texts, strict=True):
        text = "".join(parts)
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, _signature(text)
            case ToolUseBlock():
                block.input = _input(text)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; what is no object (the answer was cut off) under a name that says so."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"INVALID_JSON": arguments}


class BlockWriter:
    """Writes the events of one answer's blocks; a delta is its text between two constant strings.

    Attributes:
        kind: of the pieces that go into the open block; None where none is open.
    """

    def __init__(self, call_id: CallId) -> None:
        self._call_id = call_id
        self._index = -1
        self.kind: str | None = None
        self._head = b""
        self._thinking: list[str] = []

    def write(self, piece: Piece) -> bytes:
        """The events that a piece makes."""
        if not _begins_block(piece, self.kind):
            return self.write_delta(piece.text)
        closing = self.close()
        self.kind, block = _opened(piece, self._call_id)
        self._index += 1
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
        self._head = head % (self._index, _DELTAS[self.kind])
        opening = closing + event("content_block_start", index=self._index, content_block=block)
        return opening if piece.kind == "call" else opening + self.write_delta(piece.text)

    def write_delta(self, text: str) -> bytes:
        """More text of the open block."""
        if self.kind == "reasoning":
            self._thinking.append(text)
        return self._head + _encode(text) + b"}}\n\n"

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self.kind is None:
            return b""
        closing = event("content_block_stop", index=self._index)
        if self.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": _signature("".join(self._thinking))}
            self._thinking.clear()
            closing = event("content_block_delta", index=self._index, delta=signature) + closing
        self.kind = None
        return closing
