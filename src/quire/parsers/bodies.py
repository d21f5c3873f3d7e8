"""How a tool call is written between its markers: one small class a way of writing.

Each reads one call (or several) from the text and hands on its name and its arguments as JSON, the latter while they are
written where that can be. A call whose text is not what it should be raises `Malformed`; what was taken by then is given
back as content, unless the call's name was handed on already. Knows ways of writing; knows no model.
"""

import ast
import dataclasses
import json
import re
from typing import Any, Protocol

from quire.parsers.offered import Tools, as_json
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting

MAX_LITERAL = 1 << 16
"""Characters of a call in Python's notation; longer ones are content."""


class Body(Protocol):
    """Reads what stands between the markers of a call."""

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        """Raises `Malformed`."""
        ...


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """`{"name": …, "arguments": …}`, or a list of such; keys in any order, others are passed over.

    Attributes:
        names, arguments: the keys; the first of each is the usual one.
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
            key = _decoded((yield from reader.json_string()))
            yield from reader.expect((":",))
            if key in self.names and name is None:
                name = _decoded((yield from reader.json_string()))
                if not tools.may_call(name):
                    raise Malformed
                out.call(name)
                out.arguments("".join(early))
            elif key in self.arguments and not has_arguments:
                has_arguments = True
                if (yield from reader.peek()) == '"':  # the object once more in quotes
                    text = _decoded((yield from reader.json_string()))
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
        _complete(reader, out)


@dataclasses.dataclass(frozen=True)
class Header:
    """The name as plain text, then the arguments as JSON.

    Attributes:
        separator: stands between the two.
        before: stands before the name (`function<sep>`), and `fence` around the arguments (a Markdown code block).
        pattern: of what stands there; its group is the name (`functions.get_weather:0`).
        usual: how the name is usually written there, with `{name}`; each `#` is a number.
    """

    separator: str
    before: str = ""
    fence: str = ""
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
        if match is None:
            raise Malformed
        out.call(match["name"])
        if self.fence:
            yield from reader.expect((self.fence,))
        yield from reader.json_value(out.arguments)
        if self.fence:
            yield from reader.expect(("```",))
        _complete(reader, out)


@dataclasses.dataclass(frozen=True)
class JsonOrHeader:
    """One of the two, as the first character tells (Mistral's tokenizers before and after version 11).

    Attributes:
        token: where the tokenizer has it, headers are usual.
    """

    json: JsonObject
    header: Header
    token: str

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        is_json = (yield from reader.starts_with(("[", "{"))) is not None
        yield from (self.json if is_json else self.header).read(reader, out, tools)


@dataclasses.dataclass(frozen=True)
class Tags:
    """Parameters one by one, each between tags; values are text, or what the function's schema says.

    Attributes:
        name: before and after the function's name; after it may be empty, then the name ends where a parameter begins.
        key: before and after a parameter's name.
        value: before and after its value; before it may be empty.
        end: after the last parameter.
        quoted: names usually stand in quotes.
        lines: values usually stand on lines of their own.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    quoted: bool = False
    lines: bool = False

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        before, after = self.name
        if before:
            yield from reader.expect((before,))
        header: list[str] = []
        stops = (after,) if after else (self.key[0], *([self.end] if self.end else []))
        found = yield from reader.until(stops, header.append)
        function = "".join(header).strip().strip("\"'")
        if not function or found is None:
            raise Malformed
        out.call(function)
        if after:
            found = yield from self._next(reader)
        count = 0
        while found == self.key[0]:
            key = yield from self._text(reader, self.key[1])
            if self.value[0]:
                yield from reader.expect((self.value[0],))
            name = key.strip().strip("\"'")
            out.arguments(("{" if not count else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
            if tools.takes_text(function, name):
                yield from self._text_value(reader, out, tools.takes_null(function, name))
            else:
                out.arguments(as_json((yield from self._text(reader, self.value[1], or_end=True)).strip("\n")))
            count += 1
            found = yield from self._next(reader)
        out.arguments("}" if count else "{}")
        _complete(reader, out)

    def _next(self, reader: Reader) -> Waiting[str | None]:
        words = (self.key[0], *([self.end] if self.end else []))
        word = yield from reader.starts_with(words)
        return None if word is None else (yield from reader.expect(words))

    def _text(self, reader: Reader, end: str, or_end: bool = False) -> Waiting[str]:
        parts: list[str] = []
        if (yield from reader.until((end,), parts.append)) is None and not or_end:
            raise Malformed
        return "".join(parts)

    def _text_value(self, reader: Reader, out: Pieces, or_null: bool) -> Waiting[None]:
        """Text up to its end tag, or up to the end of the text; one line break on either side belongs to the tags."""
        line = _JsonText(out, or_null)
        yield from reader.until((self.value[1],), line.add)
        line.end()


class _JsonText:
    """Text as a JSON string, without one line break at its beginning and one at its end; `null` may mean null."""

    def __init__(self, out: Pieces, or_null: bool) -> None:
        self._out, self._or_null = out, or_null
        self._opened, self._held = False, ""

    def add(self, text: str) -> None:
        self._held += text
        if not self._opened:
            if not self._held or (self._or_null and "null".startswith(self._held.strip("\n"))):
                return
            self._open()
        kept = self._held.removesuffix("\n")
        self._out.arguments(json.dumps(kept, ensure_ascii=False)[1:-1])
        self._held = self._held[len(kept) :]

    def _open(self) -> None:
        self._opened, self._held = True, self._held.removeprefix("\n")
        self._out.arguments('"')

    def end(self) -> None:
        if not self._opened and self._or_null and self._held.strip("\n") == "null":
            self._out.arguments("null")
            return
        if not self._opened:
            self._open()
        self._out.arguments(json.dumps(self._held.removesuffix("\n"), ensure_ascii=False)[1:])


@dataclasses.dataclass(frozen=True)
class Pythonic:
    """`[f(a=1, b="x"), g()]`, or one call a line; values are Python's literals. A call is handed on when it is whole."""

    brackets: bool = True

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        if self.brackets:
            yield from reader.expect(("[",))
        while True:
            first = yield from reader.peek()
            if self.brackets and first == "]":
                reader.take(1)
                return
            if not (first.isidentifier()):
                if self.brackets or not out.num_calls:
                    raise Malformed
                return
            text = yield from self._whole_call(reader)
            name, arguments = _python_call(text)
            if not tools.may_call(name):
                raise Malformed
            out.call(name)
            out.arguments(json.dumps(arguments, ensure_ascii=False))
            _complete(reader, out)
            if self.brackets and (yield from reader.expect((",", "]"))) == "]":
                return

    def _whole_call(self, reader: Reader) -> Waiting[str]:
        """Up to the bracket that closes the first one; brackets in strings do not count."""
        size, depth, quote = 0, 0, ""
        while True:
            while size < len(reader.text):
                char = reader.text[size]
                size += 1
                if quote:
                    if char == "\\":
                        size += 1
                    elif char == quote:
                        quote = ""
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                    if depth == 0:
                        return reader.take(size)
                elif depth == 0 and not (char.isidentifier() or char.isdigit() or char in ". "):
                    raise Malformed
            if reader.ended or size > MAX_LITERAL:
                raise Malformed
            yield


def _python_call(text: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call in Python's notation; only literals are read, nothing is run."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise Malformed
        arguments = {str(keyword.arg): ast.literal_eval(_Constants().visit(keyword.value)) for keyword in call.keywords}
        json.dumps(arguments, allow_nan=False)
        return ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error


class _Constants(ast.NodeTransformer):
    """JSON's words for constants, which stand between Python's literals where values are objects or lists."""

    _VALUES = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:  # the name is Python's
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _decoded(string: str) -> str:
    """What a JSON string says."""
    try:
        return json.loads(string, strict=False)
    except ValueError as error:
        raise Malformed from error


def _complete(reader: Reader, out: Pieces) -> None:
    """A call has been read: what is taken from here on can be given back by itself."""
    out.in_call = False
    reader.mark()


def _nowhere(text: str) -> None:
    """Text that nobody needs."""
