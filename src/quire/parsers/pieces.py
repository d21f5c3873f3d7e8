"""What a client gets: pieces of reasoning, content and calls, with the white space that belongs to the format left out.

Knows kinds of pieces; knows no format.
"""

import contextlib
import dataclasses
from typing import Any, Literal

from quire.guards import is_dict
from quire.json_text import parse_json

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some more of the answer.

    Attributes:
        text: more text; of a `call` the function's name.
        index: of the call, for `call` and `arguments`.
        id: of a `call`, where the model writes it.
    """

    kind: Kind
    text: str
    index: int = 0
    id: str = ""


class Pieces:
    """Collects pieces, and joins neighbours.

    Attributes:
        num_calls: calls so far.
        in_call: the last one was begun and is not complete.
        own_space: the kinds of text that white space behind a marker belongs to.
        own_end: those that white space before a marker belongs to.
    """

    def __init__(self, own_space: tuple[Kind, ...] = (), own_end: tuple[Kind, ...] = ()) -> None:
        self.own_space, self.own_end = own_space, own_end
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._space = ""
        self._kind: Kind = "content"
        self._skips_space = False
        self._has_content = False
        self._before: str | None = None
        self._after = ""
        self.in_call = False

    def text(self, kind: Kind, text: str) -> None:
        """More reasoning or content. White space at its end is kept back: a marker may follow."""
        if kind != self._kind:
            self.marker()
            self._kind = kind
        if self._skips_space and kind not in self.own_space:
            text = self._after_marker(kind, text)
        if not text:
            return
        self._skips_space = False
        whole = self._space + text
        # White space alone before a call, or between two, is no content.
        begins = kind == "content" and (not self._has_content or self._before is not None)
        kept = whole if kind in self.own_end and (whole.strip() or not begins) else whole.rstrip()
        self._has_content = self._has_content or (kind == "content" and bool(kept))
        self._space = whole[len(kept) :]
        if kept:
            self._before = self._before if kind == "reasoning" else None
            self._add(Piece(kind, kept))

    def _after_marker(self, kind: Kind, text: str) -> str:
        """Text without the white space before it, which belongs to the format; but where calls or reasoning come between two
        parts of the content, the white space before them and behind them stays between the two."""
        kept = text.lstrip()
        if kind == "reasoning" or self._before is None:
            return kept
        self._after += text[: len(text) - len(kept)]
        if not kept:
            return ""
        between, self._before = self._before + self._after, None
        return between + kept

    def passes(self, kind: Kind, text: str) -> bool:
        """Whether `text` would add a piece that is that text, and change nothing else."""
        begins = kind == "content" and not self._has_content
        if kind != self._kind or begins or self._space or self._skips_space or not text:
            return False
        return kind in self.own_end or not text[-1].isspace()

    def keep_space(self) -> None:
        """White space that was kept back belongs to the content, if that has begun."""
        if self._kind == "content" and self._has_content and self._space:
            self._add(Piece("content", self._space))
            self._space = ""

    def marker(self) -> None:
        """A marker of the format comes here: white space on either side is the format's."""
        self._space, self._after, self._skips_space = "", "", True

    def resume(self, kind: Kind) -> None:
        """The answer begins within a text of this kind that the prompt has begun: white space that comes first is the text's."""
        self._kind = kind

    def line_break(self, kind: Kind) -> None:
        """Another message of reasoning or content begins, on a line of its own."""
        self.marker()
        self._kind = kind
        self._add(Piece(kind, "\n"))

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins. `call_id`: its id, if the model writes one."""
        self.interrupt()
        self._pieces.append(Piece("call", name, self.num_calls, call_id))
        self.num_calls += 1
        self.in_call = True

    def interrupt(self) -> None:
        """A marker or a call comes between this part of the content and the next: the white space on either side stays."""
        if self._has_content and self._before is None:
            self._before = self._space
        self.marker()

    def arguments(self, text: str) -> None:
        """More of the last call's arguments, which are JSON."""
        if text:
            self._add(Piece("arguments", text, self.num_calls - 1))

    def end(self) -> None:
        """Nothing follows: white space that was kept back is the answer's own."""
        if self._space:
            self._add(Piece(self._kind, self._space))
            self._space = ""

    def drain(self) -> list[Piece]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _add(self, piece: Piece) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (last.kind, last.index) == (piece.kind, piece.index):
            self._pieces[-1] = Piece(piece.kind, last.text + piece.text, piece.index)
        else:
            self._pieces.append(piece)


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments; what is no object (the answer was cut off) under a name that says so."""
    with contextlib.suppress(ValueError):
        if is_dict(value := parse_json(text or "{}")):
            return value
    return {"INVALID_JSON": text}


@dataclasses.dataclass(slots=True)
class Call:
    """A whole tool call; `arguments` is JSON, as the model wrote it or converted from its format; `id` is the model's own."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclasses.dataclass(slots=True)
class Answer:
    """A whole answer, parsed."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list[Call])

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        match piece.kind:
            case "reasoning":
                self.reasoning += piece.text
            case "content":
                self.content += piece.text
            case "call":
                self.calls.append(Call(piece.text, id=piece.id))
            case "arguments":
                self.calls[piece.index].arguments += piece.text
