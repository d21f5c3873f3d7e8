"""The grammar of a call whose parameters stand one by one, in a way of writing that is not JSON.

Parameters come in the schema's order; those that are not required may be left out. Knows ways of writing and JSON schemas.
"""

import dataclasses
import keyword
import re
from collections.abc import Mapping
from typing import Any, Protocol

from quire.parsers.braces import Braces
from quire.parsers.elements import NAME, Elements
from quire.parsers.lark import Lark
from quire.parsers.offered import Function
from quire.parsers.schemas import Inexpressible, is_open, plain_object, plain_part, prepared, text_pattern, variants
from quire.parsers.tags import CDATA, TagHeader, Tags

MAX_DEPTH = 16
_NUMBER = "[0-9]{1,4}"
_OPEN_KEY = r'[^<>\n"\']{1,64}'


def _in_order(required: frozenset[str], parts: Mapping[str, str]) -> str:
    """Each part in turn, or nothing in its place where it is not required."""
    return " ".join(part if key in required else f"({part})?" for key, part in parts.items())


def _separated(lark: Lark, required: frozenset[str], parts: Mapping[str, str], between: str) -> str:
    """The same with something between those that are there."""
    after, firsts = "", list[str]()
    for key, part in reversed(list(parts.items())):
        one = lark.rule(part)
        firsts = [f"{one} {after}"] if key in required else [f"{one} {after}", *firsts]
        after = lark.rule(f"({between} {one}){'' if key in required else '?'} {after}")
    return f"({' | '.join(firsts)}){'' if required else '?'}" if firsts else ""


def _is_boolean(function: Function, schema: Any) -> bool:
    return function.types(schema) == {"boolean"} and not {"enum", "const"} & function.resolved(schema).keys()


def _json(lark: Lark, function: Function, schema: Any) -> str:
    return lark.json(prepared(function.parameters, function.resolved(schema)), not function.is_strict)


# --- tags ---


def tags_call(lark: Lark, body: Tags, function: Function, written: str = "") -> str:
    """A call with parameters between tags; `written`: what of it is written already.

    Raises:
        Inexpressible: a name or a schema cannot be written so.
    """
    opening = (
        f"{body.prefix}{body.name[0].removeprefix(written)}{_checked(function.name, body.name_header)}{body.name[1]}"
    )
    required, schemas = plain_object(function)
    values: dict[str, str] = {}
    for key, schema in schemas.items():
        start = body.key[0] + _checked(key, body.key_header) + body.key[1]
        values[key] = f"({' | '.join(_tag_ways(lark, body, function, start, schema))}) space"
    parts = [_numbered(lark, opening), "space", _in_order(required, values)]
    if not schemas and is_open(function):
        before, after = body.key_header.usual.split("{name}")
        key = lark.until(_typed(after, "string") + body.key[1], _OPEN_KEY)
        parts.append(f"({lark.text(body.key[0] + before)} {key} {_text_value(lark, body, None)} space)*")
    return " ".join([*parts, lark.text(body.end)])


def _checked(name: str, header: TagHeader) -> str:
    """The name as it stands in a tag."""
    if not name or set(name) & set("<>\"'\n&#{}") or name != name.strip():
        raise Inexpressible
    return header.usual.replace("{name}", name)


def _numbered(lark: Lark, text: str) -> str:
    """A text in which each `#` is a number."""
    return f" {lark.pattern(_NUMBER)} ".join(map(lark.text, text.split("#")))


def _typed(text: str, json_type: str) -> str:
    """A tag that tells a value's type."""
    is_text = "true" if json_type == "string" else "false"
    return text.replace("{is_text}", is_text).replace("{type}", "number" if json_type == "integer" else json_type)


def _tag_ways(lark: Lark, body: Tags, function: Function, start: str, schema: Any) -> list[str]:
    """A parameter in every way in which it may be written."""
    if _typed(start, "string") == start:
        return [f"{lark.text(start)} {_tag_value(lark, body, function, schema)}"]
    ways: list[str] = []
    for json_type, part in variants(function, schema):
        is_text = json_type == "string"
        pattern = text_pattern(function, part, body.value[1], body.lines) if is_text else None
        json_value = f"space {{}} space {lark.text(body.value[1])}"
        value = _text_value(lark, body, pattern) if is_text else json_value.format(_json(lark, function, part))
        ways.append(f"{lark.text(_typed(start, json_type))} {value}")
    return list(dict.fromkeys(ways))


def _tag_value(lark: Lark, body: Tags, function: Function, schema: Any) -> str:
    if function.is_text(schema):
        return _text_value(lark, body, text_pattern(function, schema, body.value[1], body.lines))
    opening, closing = f"space {lark.text(body.value[0])} space", f"space {lark.text(body.value[1])}"
    if _is_boolean(function, schema):
        return f'{opening} ("true" | "false" | "True" | "False") {closing}'
    return f"{opening} {_json(lark, function, schema)} {closing}"


def _text_value(lark: Lark, body: Tags, pattern: str | None) -> str:
    opening = f"space {lark.text(body.value[0])}" if body.value[0] else ""
    if body.strips and pattern is not None:  # white space at either end needs a CDATA section
        return (
            f"({lark.text(CDATA[0])} {lark.until(CDATA[1] + body.value[1], pattern)} | "
            f"{lark.until(body.value[1], pattern, bare=True)})"
        )
    return f"{opening} {lark.until(body.value[1], pattern, (body.key[0], body.end) if body.runs_on else ())}"


# --- Python's notation ---


def python_call(lark: Lark, function: Function) -> str:
    """`f(a=1, b="x")`.

    Raises:
        Inexpressible: a name is none of Python's.
    """
    if not all(map(_is_identifier, function.name.split("."))):
        raise Inexpressible
    required, schemas = plain_object(function)
    if is_open(function) or not all(map(_is_identifier, schemas)):
        raise Inexpressible
    parts = {
        key: f'{lark.text(key)} space "=" space {_python_value(lark, function, schema)}'
        for key, schema in schemas.items()
    }
    arguments = _separated(lark, required, parts, 'space "," space')
    return f'{lark.text(function.name + "(")} space {arguments} space ")"'


def _is_identifier(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _python_value(lark: Lark, function: Function, schema: Any) -> str:
    return '("True" | "False")' if _is_boolean(function, schema) else _json(lark, function, schema)


# --- values within values ---


class _Notation(Protocol):
    """How values are written that are neither JSON nor Python's."""

    def text(self, schema: Mapping[str, Any]) -> str:
        """A string."""
        ...

    def items(self, schema: Any, least: int, most: int | None, depth: int) -> str:
        """A list of so many values of a schema."""
        ...

    def named(self, schema: Mapping[str, Any], depth: int) -> str:
        """An object."""
        ...


def _value(lark: Lark, notation: _Notation, function: Function, schema: Any, depth: int) -> str:
    """A value of a schema.

    Raises:
        Inexpressible: the schema is more than types, lists and objects; or it refers to itself.
    """
    ways: list[str] = []
    found = variants(function, schema)
    if depth > MAX_DEPTH or not found:
        raise Inexpressible
    for json_type, part in found:
        if json_type in ("array", "object") and {"enum", "const"} & part.keys():
            raise Inexpressible
        match json_type:
            case "string":
                ways.append(notation.text(part))
            case "array":
                if {"prefixItems", "contains"} & part.keys():
                    raise Inexpressible
                ways.append(
                    notation.items(part.get("items"), part.get("minItems") or 0, part.get("maxItems"), depth + 1)
                )
            case "object":
                ways.append(notation.named(part, depth + 1))
            case _:
                ways.append(_json(lark, function, part))
    return f"({' | '.join(map(lark.rule, ways))})"


def _repeated(item: str, least: int, most: int | None, between: str) -> str:
    if most == 0:
        return ""
    if most == 1:
        return item if least else f"({item})?"
    count = "*" if least < 2 and most is None else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    more = f"({between} {item}){count}"
    return f"{item} {more}" if least else f"({item} {more})?"


def _names(schemas: Mapping[str, Any]) -> None:
    if not all(re.fullmatch(r"[\w.-]+", key) for key in schemas):
        raise Inexpressible


# --- braces ---


def braces_call(lark: Lark, body: Braces, function: Function) -> str:
    """`call:f{a:<q>x<q>,b:1}`.

    Raises:
        Inexpressible: a name or a schema cannot be written so.
    """
    if not re.fullmatch(r"[\w.:/-]+", function.name):
        raise Inexpressible
    return f"{lark.text(body.before + function.name)} {_Braced(lark, body, function).named(function.root, 0)}"


@dataclasses.dataclass(frozen=True)
class _Braced:
    lark: Lark
    body: Braces
    function: Function

    def text(self, schema: Mapping[str, Any]) -> str:
        quote = self.body.quote
        return f"{self.lark.text(quote)} {self.lark.until(quote, text_pattern(self.function, schema, quote, False))}"

    def items(self, schema: Any, least: int, most: int | None, depth: int) -> str:
        item = self._value(schema, depth)
        return f'"[" {_repeated(item, least, most, chr(34) + "," + chr(34))} "]"'

    def named(self, schema: Mapping[str, Any], depth: int) -> str:
        required, schemas = plain_part(self.function, schema)
        _names(schemas)
        parts = {key: f"{self.lark.text(key + ':')} {self._value(each, depth)}" for key, each in schemas.items()}
        return f'"{{" {_separated(self.lark, required, parts, chr(34) + "," + chr(34))} "}}"'

    def _value(self, schema: Any, depth: int) -> str:
        if not self.body.quotes_all:
            return _value(self.lark, self, self.function, schema, depth)
        if self.function.is_text(schema):
            return self.text(self.function.resolved(schema))
        quote = self.lark.text(self.body.quote)
        return f"{quote} space {_json(self.lark, self.function, schema)} space {quote}"


# --- elements ---


def elements_call(lark: Lark, body: Elements, function: Function) -> str:
    """`<a>x</a><b><item>1</item></b></invoke>`, each tag behind a mark.

    Raises:
        Inexpressible: a name or a schema cannot be written so.
    """
    opening = lark.text(f"{_checked(function.name, NAME)}>")
    inner = _Elements(lark, body, function).named(function.root, 0)
    return f"{opening} space {inner} {lark.text(f'{body.mark}</{body.end}>')}"


@dataclasses.dataclass(frozen=True)
class _Elements:
    lark: Lark
    body: Elements
    function: Function

    def text(self, schema: Mapping[str, Any], closing: str = "") -> str:
        """A string and what ends it."""
        mark = self.body.mark
        return self.lark.until(mark + closing, text_pattern(self.function, schema, mark, False), (mark,))

    def items(self, schema: Any, least: int, most: int | None, depth: int) -> str:
        item = self._element(self.body.item, {} if schema is None else schema, depth)
        return f"space {_repeated(item, least, most, 'space')} space"

    def named(self, schema: Mapping[str, Any], depth: int) -> str:
        required, schemas = plain_part(self.function, schema)
        _names(schemas)
        return "space " + _in_order(required, {
            key: f"{self._element(key, each, depth)} space" for key, each in schemas.items()
        })  # fmt: skip

    def _element(self, name: str, schema: Any, depth: int) -> str:
        lark, mark = self.lark, self.body.mark
        ways: list[str] = []
        for json_type, part in variants(self.function, schema):
            if json_type == "string":
                ways.append(self.text(part, f"</{name}>"))
            else:
                inner = _value(lark, self, self.function, part, depth)
                ways.append(f"{inner} {lark.text(f'{mark}</{name}>')}")
        if not ways:
            raise Inexpressible
        return f"{lark.text(f'{mark}<{name}>')} ({' | '.join(map(lark.rule, dict.fromkeys(ways)))})"
