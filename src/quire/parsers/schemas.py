"""The JSON schemas of functions, made ready for grammars.

Objects that name their properties have no others unless they say so, as OpenAI's strict functions and vLLM's forced calls have
it. Knows JSON schemas; knows neither formats nor how a grammar is written.
"""

import re
from collections.abc import Mapping
from typing import Any

from quire.guards import is_dict, is_sequence
from quire.json_schemas import DEFINITIONS, close_objects
from quire.lark import ANY_TEXT, escaped
from quire.parsers.offered import Function, fixed_values

_MORE_THAN_A_LIST = frozenset(
    (
        *("anyOf", "oneOf", "allOf", "if", "not", "const", "enum", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties"),
    )
)


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
        return close_objects(whole)
    if not all(reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)) for reference in _references(part)):
        raise Inexpressible
    return close_objects({**{name: parameters[name] for name in DEFINITIONS if name in parameters}, **part})


def named_properties(schema: Mapping[str, Any]) -> tuple[frozenset[str], Mapping[str, Any]]:
    """What is required of an object's properties, and each one's schema.

    Raises:
        Inexpressible: the schema is more than a list of properties of which some are required.
    """
    properties: Any = schema.get("properties")
    properties = properties if is_dict(properties) else {}
    named = schema.get("required")
    required = frozenset(map(str, named)) if is_sequence(named) else frozenset[str]()
    if _MORE_THAN_A_LIST & schema.keys() or not required <= properties.keys():
        raise Inexpressible
    return required, properties


def is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object names no properties and may have any."""
    return bool(schema) and "properties" not in schema and schema.get("additionalProperties") is not False


def _references(schema: Any) -> list[str]:
    if is_sequence(schema):
        return [reference for part in schema for reference in _references(part)]
    if not is_dict(schema):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [reference for part in schema.values() for reference in _references(part)]


# --- text without quotes ---


def text_pattern(function: Function, schema: Any, end: str, lines: bool) -> str | None:
    """The regular expression of a text before its end marker, line breaks around it included; None where it is any text.

    Args:
        lines: the text is on lines of its own.

    Raises:
        Inexpressible: a value contains the marker, or the schema's pattern cannot be written.
    """
    texts = [part for json_type, part in function.variants(schema) if json_type == "string"]
    choices = [choice for each in texts if (choice := _text_choice(each, end)) is not None]
    if not texts or len(choices) < len(texts):
        return None
    if "null" in function.types(schema):
        choices.append("null")
    value = "|".join(dict.fromkeys(choices))
    return rf"\n({value})\n" if lines else f"({value})"


def _text_choice(schema: Mapping[str, Any], end: str) -> str | None:
    """The regular expression of one schema's texts; None where any text will do."""
    values = fixed_values(schema)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if any(end in text or text != text.strip("\n") for text in texts):
            raise Inexpressible
        return "|".join(map(escaped, texts))
    bounds = [schema.get("minLength"), schema.get("maxLength")]
    if isinstance(schema.get("pattern"), str):
        return _whole(schema["pattern"])
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
    return f"{'' if begins else ANY_TEXT}({inner}){'' if ends else ANY_TEXT}"
