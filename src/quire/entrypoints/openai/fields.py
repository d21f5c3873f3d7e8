"""Fields of loosely typed bodies, read one by one; what has another type is a 400 that names its path."""

from typing import Any, TypeAlias, cast

from quire.entrypoints.openai.errors import bad_field

Fields: TypeAlias = dict[str, Any]


def string_field(fields: Fields, name: str, path: str) -> str:
    """The string under a name of the object at `path`."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{path}.{name}", "expected a string.")
    return value


def object_at(value: Any, path: str) -> Fields:
    """A value that must be an object."""
    if not isinstance(value, dict):
        raise bad_field(path, "expected an object.")
    return cast("Fields", value)
