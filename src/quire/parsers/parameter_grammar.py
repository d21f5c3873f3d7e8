"""The grammar of a call whose parameters are written one by one, in a notation that is not JSON.

Parameters come in the schema's order; those that are not required may be left out. Knows ways of writing and JSON schemas.
"""

import dataclasses
import keyword
import re
from collections.abc import Mapping
from typing import Any

from quire.lark import Lark
from quire.parsers.braces import Braces
from quire.parsers.elements import NAME, Elements
from quire.parsers.offered import Function
from quire.parsers.schemas import Inexpressible, is_open, named_properties, prepared, text_pattern
from quire.parsers.tags import CDATA, TagHeader, Tags

MAX_DEPTH = 16
_NUMBER = "[0-9]{1,4}"
_COMMA = '","'
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
    required, schemas = named_properties(function.root)
    values: dict[str, str] = {}
    for key, schema in schemas.items():
        start = body.key[0] + _checked(key, body.key_header) + body.key[1]
        values[key] = f"({' | '.join(_tag_ways(lark, body, function, start, schema))}) space"
    parts = [_numbered(lark, opening), "space", _in_order(required, values)]
    if not schemas and is_open(function.root):
        before, after = body.key_header.usual.split("{name}")
        key = lark.until(_typed(after, "string") + body.key[1], _OPEN_KEY)
        parts.append(f"({lark.text(body.key[0] + before)} {key} {_text_value(lark, body, None)} space)*")
    return " ".join([*parts, lark.text(body.end)])


def _checked(name: str, header: TagHeader) -> str:
    """The name as it is written in a tag."""
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
    for json_type, part in function.variants(schema):
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
    required, schemas = named_properties(function.root)
    if is_open(function.root) or not all(map(_is_identifier, schemas)):
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


# --- values within values, in neither JSON nor Python ---


def _value(notation: "_Braced | _Elements", schema: Any, depth: int, end: str = "") -> str:
    """A value of a schema, and `end` behind it.

    Raises:
        Inexpressible: the schema is more than types, lists and objects; or it refers to itself.
    """
    ways: list[str] = []
    lark, function = notation.lark, notation.function
    found = function.variants(schema)
    if depth > MAX_DEPTH or not found:
        raise Inexpressible
    for json_type, part in found:
        if json_type in ("array", "object") and {"enum", "const", "prefixItems", "contains"} & part.keys():
            raise Inexpressible
        match json_type:
            case "string":
                ways.append(notation.text(part, end))
                continue
            case "array":
                value = notation.items(part, depth + 1)
            case "object":
                value = notation.named(part, depth + 1)
            case _:
                value = _json(lark, function, part)
        ways.append(f"{value} {lark.text(end)}")
    return f"({' | '.join(map(lark.rule, dict.fromkeys(ways)))})"


def _repeated(schema: Mapping[str, Any], item: str, between: str) -> str:
    """As many items as a list's schema allows."""
    least, most = schema.get("minItems") or 0, schema.get("maxItems")
    if most == 0:
        return ""
    if most == 1:
        return item if least else f"({item})?"
    count = "*" if least < 2 and most is None else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    more = f"({between} {item}){count}"
    return f"{item} {more}" if least else f"({item} {more})?"


def _nested_properties(schema: Mapping[str, Any]) -> tuple[frozenset[str], Mapping[str, Any]]:
    """The properties of an object that has no others."""
    required, schemas = named_properties(schema)
    if is_open(schema) or not all(re.fullmatch(r"[\w.-]+", key) for key in schemas):
        raise Inexpressible
    return required, schemas


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
    """Values as `Braces` reads them."""

    lark: Lark
    body: Braces
    function: Function

    def text(self, schema: Mapping[str, Any], end: str) -> str:
        quote = self.body.quote
        return (
            f"{self.lark.text(quote)} {self.lark.until(quote + end, text_pattern(self.function, schema, quote, False))}"
        )

    def items(self, schema: Mapping[str, Any], depth: int) -> str:
        return f'"[" {_repeated(schema, self._member(schema.get("items"), depth), _COMMA)} "]"'

    def named(self, schema: Mapping[str, Any], depth: int) -> str:
        required, schemas = _nested_properties(schema)
        parts = {key: f"{self.lark.text(key + ':')} {self._member(each, depth)}" for key, each in schemas.items()}
        return f'"{{" {_separated(self.lark, required, parts, _COMMA)} "}}"'

    def _member(self, schema: Any, depth: int) -> str:
        if not self.body.quotes_all:
            return _value(self, schema, depth)
        if self.function.is_text(schema):
            return self.text(self.function.resolved(schema), "")
        quote = self.lark.text(self.body.quote)
        return f"{quote} space {_json(self.lark, self.function, schema)} space {quote}"


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
    """Values as `Elements` reads them."""

    lark: Lark
    body: Elements
    function: Function

    def text(self, schema: Mapping[str, Any], end: str) -> str:
        mark = self.body.mark
        return self.lark.until(end, text_pattern(self.function, schema, mark, False), (mark,))

    def items(self, schema: Mapping[str, Any], depth: int) -> str:
        return (
            f"space {_repeated(schema, self._element(self.body.item, schema.get('items', {}), depth), 'space')} space"
        )

    def named(self, schema: Mapping[str, Any], depth: int) -> str:
        required, schemas = _nested_properties(schema)
        parts = {key: f"{self._element(key, each, depth)} space" for key, each in schemas.items()}
        return f"space {_in_order(required, parts)}"

    def _element(self, name: str, schema: Any, depth: int) -> str:
        mark = self.body.mark
        return f"{self.lark.text(f'{mark}<{name}>')} {_value(self, schema, depth, f'{mark}</{name}>')}"
