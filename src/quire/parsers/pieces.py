"""What a client gets: pieces of reasoning, content and calls, with the white space that belongs to the format left out.

Knows kinds of pieces; knows no format.
"""

import dataclasses
import json
from typing import Any, Literal, cast

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some more of the answer.

    Attributes:
        text: more text; of a `call` the function's name.
        index: of the call, for `call` and `arguments`.
    """

    kind: Kind
    text: str
    index: int = 0


class Pieces:
    """Collects pieces, and joins neighbours.

    Attributes:
        num_calls: calls so far.
        in_call: the last one was begun and is not complete.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._space = ""
        self._kind: Kind = "content"
        self._skips_space = False
        self.in_call = False

    def text(self, kind: Kind, text: str) -> None:
        """More reasoning or content. White space at its end is kept back: a marker may follow."""
        if kind != self._kind:
            self.marker()
            self._kind = kind
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space = False
        whole = self._space + text
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        if kept:
            self._add(Piece(kind, kept))

    def marker(self) -> None:
        """A marker of the format stands here: white space on either side is the format's."""
        self._space, self._skips_space = "", True

    def call(self, name: str) -> None:
        """A call begins."""
        self.marker()
        self._pieces.append(Piece("call", name, self.num_calls))
        self.num_calls += 1
        self.in_call = True

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


@dataclasses.dataclass(slots=True)
class Call:
    """A whole tool call; `arguments` is JSON, as the model wrote it or converted from its format."""

    name: str
    arguments: str = ""


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
                self.calls.append(Call(piece.text))
            case "arguments":
                self.calls[piece.index].arguments += piece.text


class Tools:
    """The functions that a request offers, by name: what types their parameters have.

    Attributes:
        is_strict: only these may be called (where nothing but a known name tells a call from other JSON).
    """

    def __init__(self, tools: list[dict[str, Any]] | None) -> None:
        self.is_strict = False
        self._parameters: dict[str, dict[str, Any]] = {}
        for tool in tools or ():
            function = _mapping(tool.get("function")) or tool
            self._parameters[str(function.get("name"))] = _mapping(
                _mapping(function.get("parameters")).get("properties")
            )

    def may_call(self, function: str) -> bool:
        """Whether a name can be that of a call."""
        return not self.is_strict or not self._parameters or function in self._parameters

    def takes_text(self, function: str, parameter: str) -> bool:
        """Whether a parameter's value is text as it stands: its schema says so, or there is none."""
        schema = self._parameters.get(function, {}).get(parameter)
        types = _types(schema)
        return schema is None or ("string" in types and not types - {"string", "null"})


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _types(schema: Any) -> set[str]:
    """Every type that a schema allows; of an enumeration, those of its values."""
    fields = _mapping(schema)
    given = fields.get("type")
    found = {given} if isinstance(given, str) else set(map(str, _list(given)))
    for choice in (*_list(fields.get("anyOf")), *_list(fields.get("oneOf"))):
        found |= _types(choice)
    return found or {"string" if isinstance(value, str) else "other" for value in _list(fields.get("enum"))}


def as_json(text: str) -> str:
    """A value that is not declared as text: itself if it is JSON, Python's words for constants, else a string."""
    stripped = text.strip()
    constants = {"True": "true", "False": "false", "None": "null"}
    if stripped in constants:
        return constants[stripped]
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped
