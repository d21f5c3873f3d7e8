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
    """Reads the text between the markers of a call."""

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        """Raises `Malformed`."""
        ...


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """`{"name": …, "arguments": …}`, or a list of such; keys in any order, others are passed over.

    Attributes:
        names, arguments: the keys; the first of each is the usual one. Without `names` an object has one key, which is the
            function's name, and its value is the arguments: `{"get_weather": {"city": "Paris"}}`.
        ids: keys of the call's id, which the model writes.
        is_list: a list is usual.
        nameless: an object without a name is a call, too, and its name is empty: the client then tells the model what is wrong.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ()
    is_list: bool = False
    nameless: bool = False

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        if (yield from reader.accept(("[",))) is None:
            yield from self._object(reader, out, tools)
            return
        if (yield from reader.accept(("]",))) is not None:
            return
        while True:
            yield from self._object(reader, out, tools)
            if (yield from reader.expect((",", "]"))) == "]":
                return

    def _object(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        yield from reader.expect(("{",))
        call = _Call(out, tools)
        if (yield from reader.starts_with(("}", '"'))) == "}":
            raise Malformed
        while True:
            key = decoded((yield from reader.json_string()))
            yield from reader.expect((":",))
            if key in self.names and not call.name:
                call.name_it(decoded((yield from reader.json_string())))
            elif key in self.ids and not call.id and (yield from reader.peek()) == '"':
                call.id = decoded((yield from reader.json_string()))
            elif not call.has_arguments and (key in self.arguments or not self.names):
                if not self.names:
                    call.name_it(key)
                yield from self._arguments(reader, call)
            else:
                yield from reader.json_value(_nowhere)
            if (yield from reader.expect((",", "}"))) == "}":
                break
        if not call.has_arguments and tools.is_bare:
            raise Malformed
        call.end(self.nameless)
        complete(reader, out)

    def _arguments(self, reader: Reader, call: "_Call") -> Waiting[None]:
        if call.tools.is_bare and not (yield from reader.opens_object()):
            raise Malformed
        call.has_arguments = True
        if (yield from reader.peek()) == '"':  # the object once more in quotes
            call.write(decoded((yield from reader.json_string())))
        else:
            yield from reader.json_value(call.write)


class _Call:
    """A call whose parts come in any order: it is handed on when its name is known, without a marker when its arguments begin."""

    def __init__(self, out: Pieces, tools: Tools) -> None:
        self.tools = tools
        self._out = out
        self._early: list[str] = []
        self._begun = False
        self.name, self.id = "", ""
        self.has_arguments = False

    def name_it(self, name: str) -> None:
        """The function's name. Raises Malformed: there is no such function."""
        if not name or not self.tools.may_call(name):
            raise Malformed
        self.name = name
        if self.has_arguments or not self.tools.is_bare:
            self.write("")

    def write(self, text: str) -> None:
        """More of the arguments."""
        self._early.append(text)
        if not self.name:
            return
        if not self._begun:
            self._begun = True
            self._out.call(self.name, self.id)
        self._out.arguments("".join(self._early))
        self._early.clear()

    def end(self, nameless: bool) -> None:
        """The object has ended. Raises Malformed: it has no name, and needs one."""
        if nameless and not self.name and self.has_arguments:
            self._out.call("", self.id)
            self._out.arguments("".join(self._early))
        elif not self.name:
            raise Malformed
        elif not self.has_arguments:
            self.write("{}")


@dataclasses.dataclass(frozen=True)
class Header:
    """The name as plain text, then the arguments as JSON.

    Attributes:
        separator: the text between the two.
        before: the text before the name (`function<sep>`).
        fence: the texts around the arguments (a Markdown code block).
        pattern: of the text with the name; its group is the name (`functions.get_weather:0`).
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
        header, separator = yield from reader.header((self.separator,))
        if separator == "{":  # the arguments begin at once
            reader.put_back()
        match = re.fullmatch(self.pattern, header)
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
        token: the other way is usual where the tokenizer has this token, and may begin with it; None: always usual.
    """

    json: JsonObject
    other: Body
    token: str | None = None

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        found = yield from reader.starts_with(("[", "{", *([self.token] if self.token else [])))
        if found == "{" and self.json.nameless:
            key = yield from reader.first_key()
            if key is not None and key not in (*self.json.names, *self.json.arguments, *self.json.ids):
                out.call("")
                yield from reader.json_value(out.arguments)
                complete(reader, out)
                return
        yield from (self.json if found in ("[", "{") else self.other).read(reader, out, tools)


@dataclasses.dataclass(frozen=True)
class Several:
    """Several calls between one pair of markers, each with a marker of its own before it, and behind it (if it has one)."""

    begin: str
    body: Body
    end: str = ""

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        yield from reader.expect((self.begin,))
        while True:
            yield from self.body.read(reader, out, tools)
            if self.end:
                yield from reader.expect((self.end,))
            if (yield from reader.accept((self.begin,))) is None:
                return


@dataclasses.dataclass(frozen=True)
class Addressed:
    """A call in a message of its own, whose header names the function: `get_weather<|message|><calls>…`.

    Attributes:
        after: the text behind the name.
        opening: the text before the call.
    """

    after: str
    opening: str
    body: Body

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        while True:
            name = re.match(r"[\w.-]*", reader.text)
            rest = reader.text[name.end() if name else 0 :]
            if reader.ended or rest.startswith(self.after) or not self.after.startswith(rest):
                break
            yield
        if not rest.startswith(self.after):
            raise Malformed
        reader.take(len(reader.text) - len(rest))
        yield from reader.expect((self.after,))
        yield from reader.expect((self.opening,))
        yield from self.body.read(reader, out, tools)


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
    """Drop the text."""
