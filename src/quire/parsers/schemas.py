"""The JSON schemas of functions, made ready for grammars.

Objects that name their properties have no others unless they say so, as OpenAI's strict functions and vLLM's forced calls have
it. Knows JSON schemas; knows neither formats nor how a grammar is written.
"""

import re
from collections.abc import Mapping
from typing import Any

from quire.guards import is_dict, is_sequence
from quire.parsers.lark import escaped
from quire.parsers.offered import Function, fixed_values

_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")
_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_MORE_THAN_A_LIST = frozenset(
    (
        *("anyOf", "oneOf", "allOf", "if", "not", "const", "enum", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties"),
    )
)
_ANY_TEXT = r"(.|\n)*"


class Inexpressible(Exception):
    """A format has no words for a function, or a grammar none for a schema."""


def prepared(parameters: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a function's arguments; or of one of its parameters, which may refer to the definitions.

    Raises:
        Inexpressible: a parameter refers to something else.
    """
    if part is None:
        whole: dict[str, Any] = dict(parameters) if parameters else {"properties": {}}
        if not any(key in whole for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
            whole["type"] = "object"
        return _closed(whole)
    if not all(reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)) for reference in _references(part)):
        raise Inexpressible
    return _closed({**{name: parameters[name] for name in _DEFINITIONS if name in parameters}, **part})


def plain_object(function: Function) -> tuple[frozenset[str], Mapping[str, Any]]:
    """What is required of a function's parameters, and each one's schema.

    Raises:
        Inexpressible: the arguments are more than a list of parameters of which some are required.
    """
    root = function.root
    named = root.get("required")
    required = frozenset(map(str, named)) if is_sequence(named) else frozenset[str]()
    if _MORE_THAN_A_LIST & root.keys() or not required <= function.properties.keys():
        raise Inexpressible
    return required, function.properties


def plain_part(function: Function, schema: Mapping[str, Any]) -> tuple[frozenset[str], Mapping[str, Any]]:
    """The same of an object within a function's parameters, or of these; it names its properties.

    Raises:
        Inexpressible: as of `plain_object`; or any property is allowed.
    """
    part = Function(function.name, {**schema, **{name: function.parameters.get(name, {}) for name in _DEFINITIONS}})
    if is_open(Function(function.name, schema)):
        raise Inexpressible
    return plain_object(part)


def variants(function: Function, schema: Any, depth: int = 8) -> list[tuple[str, dict[str, Any]]]:
    """The types that a value may have, each with the schema of such values."""
    fields = dict(function.resolved(schema))
    for key in ("anyOf", "oneOf"):
        choices = fields.get(key)
        if is_sequence(choices) and depth:
            return [found for choice in choices for found in variants(function, choice, depth - 1)]
    return [(each, {**fields, "type": each}) for each in sorted(function.types(fields))]


def is_open(function: Function) -> bool:
    """Whether parameters that the schema does not name may be given, and it names none."""
    return (
        bool(function.parameters)
        and "properties" not in function.root
        and function.root.get("additionalProperties") is not False
    )


def _closed(schema: Any) -> Any:
    """Without annotations; objects have only the properties that they name, except within `allOf`, whose parts add up."""
    if not is_dict(schema):
        return schema
    found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key in _NAMED:
        if is_dict(found.get(key)):
            found[key] = {name: _closed(part) for name, part in found[key].items()}
    for key in (*_ONE, *_SEVERAL):
        part = found.get(key)
        found |= {key: [_closed(each) for each in part]} if is_sequence(part) else {key: _closed(part)} if part else {}
    if "properties" in found and not {"additionalProperties", "patternProperties", "allOf"} & found.keys():
        found["additionalProperties"] = False
    return found


def _references(schema: Any) -> list[str]:
    if is_sequence(schema):
        return [reference for part in schema for reference in _references(part)]
    if not is_dict(schema):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [reference for part in schema.values() for reference in _references(part)]


# --- text that stands without quotes ---


def text_pattern(function: Function, schema: Any, end: str, lines: bool) -> str | None:
    """The regular expression of a text before its end marker, line breaks around it included; None where it is any text.

    Args:
        lines: the text stands on lines of its own.

    Raises:
        Inexpressible: a value contains the marker, or the schema's pattern cannot be written.
    """
    fields = function.resolved(schema)
    choices_of = [fields.get(key) for key in ("anyOf", "oneOf")]
    texts = [fields, *(function.resolved(one) for each in choices_of if is_sequence(each) for one in each)]
    texts = [each for each in texts if "string" in function.types(each) and not {"anyOf", "oneOf"} & each.keys()]
    choices = [choice for each in texts if (choice := _text_choice(each, end)) is not None]
    if not texts or len(choices) < len(texts):
        return None
    if "null" in function.types(schema):
        choices.append("null")
    value = "|".join(dict.fromkeys(choices))
    return rf"\n({value})\n" if lines else f"({value})"


def _text_choice(schema: Mapping[str, Any], end: str) -> str | None:
    """One form of the text; None where any text will do."""
    values = fixed_values(schema)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if any(end in text or text != text.strip("\n") for text in texts):
            raise Inexpressible
        return "|".join(map(escaped, texts))
    bounds = [schema.get("minLength"), schema.get("maxLength")]
    if isinstance(schema.get("pattern"), str):
        return _whole(_ascii_classes(schema["pattern"]))
    if bounds == [None, None]:
        return None
    if not all(isinstance(bound, int | None) for bound in bounds):
        raise Inexpressible
    return rf"(.|\n){{{bounds[0] or 0},{'' if bounds[1] is None else bounds[1]}}}"


def _whole(pattern: str) -> str:
    """A pattern that is searched for as one that matches the whole text.

    Raises:
        Inexpressible: it has alternatives outside of brackets, with anchors.
    """
    outside, depth = "", 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, flags=re.S):
        depth += (part == "(") - (part == ")")
        outside += part if depth == 0 and len(part) == 1 else "_"
    if "|" in outside and set("^$") & set(pattern):
        raise Inexpressible
    begins, ends = outside.startswith("^"), outside.endswith("$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else _ANY_TEXT}({inner}){'' if ends else _ANY_TEXT}"


def _ascii_classes(pattern: str) -> str:
    r"""\d, \w and \s mean ASCII, as in JSON schemas."""
    classes = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\r\n\f\x0B"}

    def replace(part: re.Match[str]) -> str:
        text = part.group()
        if text.startswith("["):
            return re.sub(r"\\.", lambda inner: classes.get(inner.group(), inner.group()), text)
        inverse = classes.get(text.lower())
        return text if inverse is None else f"[{'' if text in classes else '^'}{inverse}]"

    return re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.", replace, pattern, flags=re.S)
