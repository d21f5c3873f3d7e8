"""How a tool call is written between its markers: one small class a way of writing. This file has those that are JSON.

Each reads one call (or several) from the text and hands on its name and its arguments as JSON, the latter while they are
written where that can be. A call whose text is not what it should be raises `Malformed`; what was taken by then is given
back as content, unless the call's name was handed on already. Knows ways of writing; knows no model.
"""

import dataclasses
import json
import re
from typing import Protocol

from quire.parsers.offered import Tools
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting


class Body(Protocol):
    """Reads what stands between the markers of a call."""

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        """Raises `Malformed`."""
        ...


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """`{"name": …, "arguments": …}`, or a list of such; keys in any order, others are passed over.

    Attributes:
        names, arguments: the keys; the first of each is the usual one. Without `names` an object has one key, which is the
            function's name, and its value is the arguments: `{"get_weather": {"city": "Paris"}}`.
        is_list: a list is usual.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    is_list: bool = False

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        if (yield from reader.starts_with(("[", "{"))) != "[":
            yield from self._object(reader, out, tools)
            return
        yield from reader.expect(("[",))
        if (yield from reader.starts_with(("]", "{"))) == "]":
            yield from reader.expect(("]",))
            return
        while True:
            yield from self._object(reader, out, tools)
            if (yield from reader.expect((",", "]"))) == "]":
                return

    def _object(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        yield from reader.expect(("{",))
        name: str | None = None
        early: list[str] = []
        has_arguments = False
        if (yield from reader.starts_with(("}", '"'))) == "}":
            raise Malformed
        while True:
            key = decoded((yield from reader.json_string()))
            yield from reader.expect((":",))
            if not self.names and name is None:
                name, has_arguments = key, True
                self._call(out, tools, name)
                yield from reader.json_value(out.arguments)
            elif key in self.names and name is None:
                name = decoded((yield from reader.json_string()))
                self._call(out, tools, name)
                out.arguments("".join(early))
            elif key in self.arguments and not has_arguments:
                has_arguments = True
                if (yield from reader.peek()) == '"':  # the object once more in quotes
                    text = decoded((yield from reader.json_string()))
                    early.append(text)
                    if name is not None:
                        out.arguments(text)
                else:
                    yield from reader.json_value(early.append if name is None else out.arguments)
            else:
                yield from reader.json_value(_nowhere)
            if (yield from reader.expect((",", "}"))) == "}":
                break
        if name is None:
            raise Malformed
        if not has_arguments:
            out.arguments("{}")
        complete(reader, out)

    def _call(self, out: Pieces, tools: Tools, name: str) -> None:
        if not name or not tools.may_call(name):
            raise Malformed
        out.call(name)


@dataclasses.dataclass(frozen=True)
class Header:
    """The name as plain text, then the arguments as JSON.

    Attributes:
        separator: stands between the two.
        before: stands before the name (`function<sep>`).
        fence: stands around the arguments (a Markdown code block); what is left out at its end is not missed.
        pattern: of what stands there; its group is the name (`functions.get_weather:0`).
        usual: how the name is usually written there, with `{name}`; each `#` is a number.
    """

    separator: str
    before: str = ""
    fence: tuple[str, str] = ("", "")
    pattern: str = r"\s*(?P<name>[^\s]+)\s*"
    usual: str = "{name}"

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        if self.before:
            yield from reader.expect((self.before,))
        header: list[str] = []
        if self.separator == "{":  # the arguments begin at once
            while "{" not in reader.text and not reader.ended:
                yield
            header.append(reader.take(max(reader.text.find("{"), 0)))
        elif (yield from reader.until((self.separator,), header.append)) is None:
            raise Malformed
        match = re.fullmatch(self.pattern, "".join(header))
        if match is None or not tools.may_call(match["name"]):
            raise Malformed
        out.call(match["name"])
        opening, closing = self.fence
        if opening:
            yield from reader.expect((opening,))
        yield from reader.json_value(out.arguments)
        if closing:
            yield from reader.expect((closing,))
        complete(reader, out)


@dataclasses.dataclass(frozen=True)
class JsonOr:
    """JSON or another way of writing, as the first character tells.

    Attributes:
        token: the other way is usual where the tokenizer has this token; None: always.
    """

    json: JsonObject
    other: Body
    token: str | None = None

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        is_json = (yield from reader.starts_with(("[", "{"))) is not None
        yield from (self.json if is_json else self.other).read(reader, out, tools)


@dataclasses.dataclass(frozen=True)
class Several:
    """Several calls between one pair of markers, each with a marker of its own before it."""

    begin: str
    body: Body

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        yield from reader.expect((self.begin,))
        while True:
            yield from self.body.read(reader, out, tools)
            if (yield from reader.starts_with((self.begin,))) is None:
                return
            yield from reader.expect((self.begin,))


def decoded(string: str) -> str:
    """What a JSON string says.

    Raises:
        Malformed: it is none.
    """
    try:
        return json.loads(string, strict=False)
    except ValueError as error:
        raise Malformed from error


def complete(reader: Reader, out: Pieces) -> None:
    """A call has been read: what is taken from here on can be given back by itself."""
    out.in_call = False
    reader.mark()


def _nowhere(text: str) -> None:
    """Text that nobody needs."""
