"""The functions that a request offers, and what their schemas say of a parameter.

Knows JSON schemas as far as formats need them that write parameters one by one. Knows no format.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from quire.guards import is_dict, is_sequence

_MAX_REFERENCES = 16


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

    def types(self, schema: Any, depth: int = 8) -> set[str]:
        """Every type that a schema allows, choices within choices up to a depth; of an enumeration, those of its values."""
        fields = self.resolved(schema)
        given = fields.get("type")
        found = {given} if isinstance(given, str) else set(map(str, _list(given)))
        for choice in (*_list(fields.get("anyOf")), *_list(fields.get("oneOf"))) if depth else ():
            found |= self.types(choice, depth - 1)
        return found or {_type_of(value) for value in fixed_values(fields) or ()}

    def is_text(self, schema: Any) -> bool:
        """Whether a value is text as it stands: its schema says so."""
        types = self.types(schema)
        return "string" in types and not types - {"string", "null"}


class Tools:
    """The functions of a request, by name.

    Attributes:
        is_strict: only these may be called (where nothing but a known name tells a call from other JSON).
        offered, tokenizer: for parsers from outside.
    """

    def __init__(self, tools: list[dict[str, Any]] | None, tokenizer: Any = None) -> None:
        self.is_strict = False
        self.offered, self.tokenizer = tools or [], tokenizer
        self._functions = {function.name: function for function in offered_functions(tools)}

    def may_call(self, function: str) -> bool:
        """Whether a name can be that of a call."""
        return not self.is_strict or not self._functions or function in self._functions

    def takes_text(self, function: str, parameter: str) -> bool:
        """Whether a parameter's value is text as it stands: its schema says so, or there is none."""
        known, schema = self._schema(function, parameter)
        return known is None or known.is_text(schema)

    def takes_null(self, function: str, parameter: str) -> bool:
        """Whether a parameter's value may be null."""
        known, schema = self._schema(function, parameter)
        return known is not None and "null" in known.types(schema)

    def _schema(self, function: str, parameter: str) -> tuple[Function | None, Any]:
        known = self._functions.get(function)
        schema = None if known is None else known.properties.get(parameter)
        return (None if schema is None else known), schema


def offered_functions(tools: list[dict[str, Any]] | None) -> list[Function]:
    """The functions of a request's tools, which are in the protocol's form (or are the functions themselves)."""
    functions = [_mapping(tool.get("function")) or tool for tool in tools or ()]
    return [
        Function(str(each.get("name")), _mapping(each.get("parameters")), each.get("strict") is True)
        for each in functions
    ]


def fixed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None where it lists none."""
    return [schema["const"]] if "const" in schema else (_list(schema["enum"]) if "enum" in schema else None)


def as_json(text: str) -> str:
    """A value that is not declared as text: itself if it is JSON, Python's words for constants, else a string."""
    stripped = text.strip()
    constants = {"True": "true", "False": "false", "None": "null"}
    if stripped in constants:
        return constants[stripped]
    try:
        json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> str:
    return "string" if isinstance(value, str) else "null" if value is None else "other"


def _mapping(value: Any) -> dict[str, Any]:
    return value if is_dict(value) else {}


def _list(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if is_sequence(value) else []
