"""The functions that a request offers, and what their schemas say of a parameter.

Knows JSON schemas as far as formats need them that write parameters one by one. Knows no format.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

from quire.guards import is_dict, is_sequence

_MAX_REFERENCES = 16
Kind = Literal["text", "other", "unknown"]


@dataclasses.dataclass(frozen=True)
class Function:
    """One function.

    Attributes:
        parameters: the JSON schema of its arguments; empty where the request gives none.
        is_strict: the client asks for arguments that follow the schema in every respect.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its parameters."""
        return _mapping(self.root.get("properties"))

    @property
    def root(self) -> Mapping[str, Any]:
        """The schema of the arguments, which may be a reference."""
        return self.resolved(self.parameters)

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or what it refers to within the arguments' schema; empty where that is not there."""
        found = _mapping(schema)
        for _ in range(_MAX_REFERENCES):
            if "$ref" not in found:
                return found
            found = self._referred(str(found["$ref"])) | {key: found[key] for key in found if key != "$ref"}
        return {}

    def _referred(self, reference: str) -> dict[str, Any]:
        found: Any = self.parameters
        for key in reference.removeprefix("#").split("/")[1:]:
            found = _mapping(found).get(key.replace("~1", "/").replace("~0", "~"))
        return dict(_mapping(found)) if reference.startswith("#/") else {}

    def variants(self, schema: Any, depth: int = 8) -> list[tuple[str, dict[str, Any]]]:
        """The types that a schema allows, each with the schema of such values; choices within choices up to a depth.

        A schema without a type has that of its values, or of what it says of items or properties.
        """
        fields = dict(self.resolved(schema))
        choices = (*_list(fields.get("anyOf")), *_list(fields.get("oneOf"))) if depth else ()
        found = [variant for choice in choices for variant in self.variants(choice, depth - 1)]
        if found:
            return found
        given = fields.get("type")
        types = {given} if isinstance(given, str) else set(map(str, _list(given)))
        types = types or {_type_of(value) for value in fixed_values(fields) or ()}
        if not types and "items" in fields:
            types = {"array"}
        elif not types and {"properties", "additionalProperties"} & fields.keys():
            types = {"object"}
        return [(each, {**fields, "type": each}) for each in sorted(types)]

    def types(self, schema: Any) -> set[str]:
        """The types that a schema allows."""
        return {each for each, _ in self.variants(schema)}

    def container(self, schema: Any) -> tuple[str, Mapping[str, Any]] | None:
        """The first list or object that a schema allows, and that one's schema."""
        return next((each for each in self.variants(schema) if each[0] in ("array", "object")), None)

    def is_text(self, schema: Any) -> bool:
        """Whether the schema says that a value is text."""
        types = self.types(schema)
        return "string" in types and not types - {"string", "null"}


class Tools:
    """The functions of a request, by name.

    Attributes:
        is_strict: only these may be called (where nothing but a known name tells a call from other JSON).
        is_bare: nothing but its JSON tells a call: it has to have a name and arguments.
        offered, tokenizer: for parsers from outside.
    """

    def __init__(self, tools: list[dict[str, Any]] | None, tokenizer: Any = None) -> None:
        self.is_strict = self.is_bare = False
        self.offered, self.tokenizer = tools or [], tokenizer
        self._functions = {function.name: function for function in offered_functions(tools)}

    def may_call(self, function: str) -> bool:
        """Whether a name can be that of a call."""
        return not self.is_strict or not self._functions or function in self._functions

    def meant(self, name: str) -> str:
        """The name of the function that a name means: models double a name that their template takes for a namespace."""
        head, _, tail = name.partition(".")
        return head if head == tail and name not in self._functions and head in self._functions else name

    def function(self, name: str) -> Function | None:
        """The function of that name."""
        return self._functions.get(name)

    def kind(self, function: str, parameter: str) -> Kind:
        """What a parameter's value is: text, anything else, or unknown, if no schema says it."""
        known = self._functions.get(function)
        if known is None or parameter not in known.properties:
            return "unknown"
        return "text" if known.is_text(known.properties[parameter]) else "other"

    def types(self, function: str, parameter: str) -> set[str]:
        """The types that a parameter's schema allows; none where no schema says it."""
        known = self._functions.get(function)
        return set() if known is None else known.types(known.properties.get(parameter))

    def lacks(self, function: str, parameter: str) -> bool:
        """Whether a function names its parameters, and this is none of them."""
        known = self._functions.get(function)
        return known is not None and bool(known.properties) and parameter not in known.properties

    def as_json(self, function: str, parameter: str, text: str) -> str:
        """The JSON of a value that is written as text, as far as the parameter's schema allows it; else a string."""
        return as_json(text, self.types(function, parameter))

    def fitted(self, function: str, arguments: str, checks: bool) -> str | None:
        """The arguments of a whole call, with values that are quoted although the schema has them as something else read as that.

        Args:
            arguments: JSON.
            checks: those that the schema does not name are left out; None where a required one is missing, or one comes twice.
        """
        try:
            pairs: Any = json.loads(arguments, object_pairs_hook=list)
            values: Any = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        known = self._functions.get(function)
        if known is None or not is_dict(values):
            return arguments
        kept = {key: value for key, value in values.items() if not (checks and self.lacks(function, key))}
        if checks and (len(pairs) > len(values) or not set(map(str, _list(known.root.get("required")))) <= kept.keys()):
            return None
        read = {key: self._unquoted(function, key, value) for key, value in kept.items()}
        return arguments if read == values else json.dumps(read, ensure_ascii=False)

    def _unquoted(self, function: str, parameter: str, value: Any) -> Any:
        is_quoted = isinstance(value, str) and self.kind(function, parameter) == "other"
        return json.loads(self.as_json(function, parameter, value)) if is_quoted else value


def offered_functions(tools: list[dict[str, Any]] | None) -> list[Function]:
    """The functions of a request's tools, as the protocol has them (or the functions themselves)."""
    functions = [_mapping(tool.get("function")) or tool for tool in tools or ()]
    return [
        Function(str(each.get("name")), _mapping(each.get("parameters")), each.get("strict") is True)
        for each in functions
    ]


def fixed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None where it lists none."""
    return [schema["const"]] if "const" in schema else (_list(schema["enum"]) if "enum" in schema else None)


def as_json(text: str, types: Collection[str] = ()) -> str:
    """A value that is not declared as text: itself if it is JSON of one of some types (empty: of any), constants and literals in
    Python's words, else a string."""
    stripped = text.strip()
    word = _CONSTANTS.get(stripped) or (_CONSTANTS.get(stripped.lower()) if {"boolean", "null"} & set(types) else None)
    if word is not None and (not types or {"boolean", "null"} & set(types)):
        return word
    found: Any = None
    try:
        found = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if {"integer", "number"} & set(types) and re.fullmatch(r"[+-]?\d+", stripped):
            return str(int(stripped))  # JSON has no leading zeros
        if stripped[:1] in ("[", "{", "(") and (not types or {"array", "object"} & set(types)):
            stripped, found = _from_literal(stripped)
        if found is None:
            return json.dumps(text, ensure_ascii=False)
    if "string" in types and not any(_is_a(found, each) for each in types):
        return json.dumps(text, ensure_ascii=False)
    if {"integer", "number"} & set(types) and isinstance(found, float) and found.is_integer():
        return str(int(found))
    return stripped


_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


def _is_a(value: Any, name: str) -> bool:
    """Whether a value is of a JSON type, strings aside."""
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES.get(name, ()))


def _from_literal(text: str) -> tuple[str, Any]:
    """A list or an object in Python's notation: its JSON, and its value; None: it is neither."""
    try:
        found = ast.literal_eval(text)
        return json.dumps(found, ensure_ascii=False, allow_nan=False), found
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text, None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> str:
    return "string" if isinstance(value, str) else "null" if value is None else "other"


def _mapping(value: Any) -> dict[str, Any]:
    return value if is_dict(value) else {}


def _list(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if is_sequence(value) else []
