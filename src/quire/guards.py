"""Type guards for values from outside: `isinstance` that also tells the type checker that the contents may be anything."""

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    """A dict; its keys are taken to be strings, as JSON's are."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """A mapping of anything."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """A list or a tuple."""
    return isinstance(value, list | tuple)
