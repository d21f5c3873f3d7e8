"""Tool calls whose parameters are written one by one, each between tags. Knows the notation; knows no model."""

import dataclasses
import functools
import json
import re
from typing import Any

from quire.guards import is_dict
from quire.parsers.bodies import complete
from quire.parsers.offered import Kind, Tools, as_json
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting

WRAPPERS = ("arguments", "input", "properties")
CDATA = ("<![CDATA[", "]]>")
"""Around text that is kept as it is, white space included."""


@dataclasses.dataclass(frozen=True)
class TagHeader:
    """The inside of a tag: a name alone, or a name and attributes.

    Attributes:
        usual: how it is usually written, with `{name}`; each `#` is a number, `{type}` the value's JSON type (an integer is a
            `number`), `{is_text}` is `true` for a string and else `false`.
    """

    usual: str = "{name}"

    @property
    def has_attributes(self) -> bool:
        """Whether names are in quotes."""
        return '"' in self.usual

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        """Which attribute (empty: the first text without one) has which placeholder."""
        return {value: key for key, value in re.findall(r'(?:(\w+)=)?"(\{\w+\})"', self.usual)}

    def read(self, text: str) -> tuple[str, bool | None]:
        """The name (empty: there is none), and whether the value is said to be a string; None: nothing is said."""
        if not self.has_attributes:
            return text.strip().strip("\"'"), None
        found = {key: value for key, *values in _ATTRIBUTE.findall(text) for value in values if value}
        name = found.get(self._keys["{name}"], "").replace("&quot;", '"').replace("&amp;", "&")
        if "{is_text}" in self._keys:
            said = found.get(self._keys["{is_text}"])
            return name, None if said is None else said == "true"
        said = found.get(self._keys.get("{type}", "-"))
        return name, None if said is None else said == "string"


_ATTRIBUTE = re.compile(r"""(?:(\w+)\s*=\s*)?(?:"([^"]*)"|'([^']*)'|([^\s"'=]+))""")


@dataclasses.dataclass(frozen=True)
class Tags:
    """Parameters one by one, each between tags; values are text, or what a tag or the function's schema says.

    Attributes:
        name: before and after the function's name; after it may be empty, then the name ends where a parameter begins.
        key: before and after a parameter's name.
        value: before and after its value; before it may be empty.
        end: after the last parameter.
        prefix: usually comes before all this.
        name_header, key_header: the inside of the two tags.
        type: around a parameter's type, which may come before its value.
        lines: values are usually on lines of their own: one line break on either side belongs to the tags.
        runs_on: a value whose end tag is missing ends where the next parameter begins, or the call ends.
        guesses: a value of which neither tag nor schema tells the type is JSON if it can be.
        strips: white space around a text does not belong to it, unless it is in a CDATA section.
        exact: without its end, with a parameter that has no name, or no type where types are written, it is no call.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    prefix: str = ""
    name_header: TagHeader = TagHeader()
    key_header: TagHeader = TagHeader()
    type: tuple[str, str] | None = None
    lines: bool = False
    runs_on: bool = False
    guesses: bool = False
    strips: bool = False
    exact: bool = False

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        before, after = self.name
        if self.prefix:
            yield from reader.accept((self.prefix,))
        if before:
            yield from reader.expect((before,))
        ends = (self.end,) if self.end else ()
        header, found = yield from reader.header((*((after,) if after else (self.key[0],)), *ends))
        function = tools.meant(self.name_header.read(header)[0])
        named = r"\S+" if self.name_header.has_attributes else r"[^\s<>]+"
        if not re.fullmatch(named, function) or not tools.may_call(function):
            raise Malformed
        out.call(function)
        if after and found == after:
            found = yield from self._next(reader)
        count = 0
        while found == self.key[0]:
            found = yield from self._parameter(reader, out, tools, function, count)
            count += 1
        if self.exact and found != self.end:
            raise Malformed
        out.arguments("}" if count else "{}")
        complete(reader, out)

    def _parameter(self, reader: Reader, out: Pieces, tools: Tools, function: str, count: int) -> Waiting[str | None]:
        """One parameter behind its first tag; returns the tag that follows."""
        header, _ = yield from reader.header((self.key[1],))
        name, is_text = self.key_header.read(header)
        if self.exact and not name:
            raise Malformed
        if self.type is not None and (self.exact or (yield from reader.starts_with(self.type[:1])) is not None):
            yield from reader.expect(self.type[:1])
            is_text = (yield from reader.header(self.type[1:]))[0].strip() == "string"
        if self.value[0]:
            yield from reader.expect((self.value[0],))
        kind = _kind(tools, function, name, is_text)
        stops = (self.value[1], *((self.key[0], self.end) if self.runs_on else ()))
        if not count and name in WRAPPERS and tools.lacks(function, name):
            return (yield from self._wrapped(reader, out, tools, function, name, stops))
        out.arguments(("{" if not count else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        if kind == "text" or (kind == "unknown" and not self.guesses):
            text = TextValue(out, self.lines, "null" in tools.types(function, name) and is_text is not True)
            if self.strips:
                value, found = yield from reader.text_until(stops)
                text.add(_stripped(value))
            else:
                found = yield from reader.until(stops, text.add)
            text.end()
        else:
            value, found = yield from reader.text_until(stops)
            value = value.strip("\n")
            out.arguments(tools.as_json(function, name, _stripped(value) if self.strips else value))
        return (yield from self._next(reader)) if found == self.value[1] else found

    def _wrapped(
        self, reader: Reader, out: Pieces, tools: Tools, function: str, name: str, stops: tuple[str, ...]
    ) -> Waiting[str | None]:
        """A parameter that the schema does not know, and that may hold all parameters as one object."""
        text, found = yield from reader.text_until(stops)
        value: Any = json.loads(as_json(text))
        whole: dict[str, Any] = {name: value}
        if is_dict(value) and value and not any(tools.lacks(function, key) for key in value):
            whole = value
        out.arguments(json.dumps(whole, ensure_ascii=False)[:-1])
        return (yield from self._next(reader)) if found == self.value[1] else found

    def _next(self, reader: Reader) -> Waiting[str | None]:
        return (yield from reader.accept((self.key[0], *([self.end] if self.end else []))))


def _kind(tools: Tools, function: str, name: str, is_text: bool | None) -> Kind:
    """What a value is: as the schema has it; where this allows text and other values, or there is none, as the tag says."""
    kind = tools.kind(function, name)
    if is_text is None:
        return kind
    allows_both = ("null" if kind == "text" else "string") in tools.types(function, name)
    return ("text" if is_text else "other") if kind == "unknown" or allows_both else kind


def _stripped(text: str) -> str:
    text = text.strip()
    if text.startswith(CDATA[0]) and text.endswith(CDATA[1]):
        return text[len(CDATA[0]) : -len(CDATA[1])]
    return text


class TextValue:
    """Text that is handed on as a JSON string while it comes.

    Args:
        lines: without one line break at its beginning and one at its end.
        or_null: the text `null` means null.
    """

    def __init__(self, out: Pieces, lines: bool = False, or_null: bool = False) -> None:
        self._out, self._break, self._or_null = out, "\n" if lines else "", or_null
        self._opened, self._held = False, ""

    def add(self, text: str) -> None:
        """More text."""
        self._held += text
        if not self._opened:
            if not self._held or (self._or_null and "null".startswith(self._held.strip("\n"))):
                return
            self._open()
        kept = self._held.removesuffix(self._break)
        self._out.arguments(json.dumps(kept, ensure_ascii=False)[1:-1])
        self._held = self._held[len(kept) :]

    def _open(self) -> None:
        self._opened, self._held = True, self._held.removeprefix(self._break)
        self._out.arguments('"')

    def end(self) -> None:
        """The text has ended."""
        if not self._opened and self._or_null and self._held.strip("\n") == "null":
            self._out.arguments("null")
            return
        if not self._opened:
            self._open()
        self._out.arguments(json.dumps(self._held.removesuffix(self._break), ensure_ascii=False)[1:])
