"""Checks of a request's parameters: each returns the value in its normal form, or raises a `RequestError` that names the
parameter, the value and what is allowed.

Parameters are made for every request, so a field at its default costs one comparison.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import msgspec

from quire.errors import RequestError, did_you_mean
from quire.guards import is_sequence

T = TypeVar("T")
Rule = Callable[[str, Any], Any]
"""Takes a parameter's name and value; returns the value in its normal form."""

_SHOWN_CHARS = 100
_INT64 = 1 << 63

_UNKNOWN = re.compile(r"Unexpected keyword argument '(\w+)'")
_GIVEN_UP = {
    "guided_": "use structured_outputs=StructuredOutputsParams(…)",
    "use_beam_search": "use LLM.beam_search with BeamSearchParams",
    "best_of": "use n, and choose among the outputs",
}
"""Parameters of older releases of vLLM (or prefixes of their names), and what replaces them."""


class ParamsMeta(msgspec.StructMeta):
    """Metaclass of parameters. An unknown keyword raises a TypeError that suggests the nearest known one."""

    if not TYPE_CHECKING:  # a checker reads the fields, not this

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                unknown = _UNKNOWN.match(str(error))
                if unknown is None:
                    raise
                hint = _hint(unknown[1], cls.__struct_fields__)
            raise TypeError(f"{cls.__name__} has no parameter {unknown[1]!r}{hint}")


def _hint(name: str, known: tuple[str, ...]) -> str:
    instead = next((text for start, text in _GIVEN_UP.items() if name.startswith(start)), None)
    return f"; {instead}" if instead else did_you_mean(name, known, "; {}")


class Check(NamedTuple):
    """One field's rule, and the field's default, which needs no check."""

    name: str
    default: Any
    rule: Rule


def checks_of(params: type[msgspec.Struct], rules: Mapping[str, Rule]) -> tuple[Check, ...]:
    """The checks of a class of parameters; `rules` gives a rule to each field that has one."""
    fields = {field.name: field for field in msgspec.structs.fields(params)}
    return tuple(Check(name, fields[name].default, rule) for name, rule in rules.items())


def apply(checks: Iterable[Check], params: Any) -> None:
    """Check each field and bring it to its normal form. Raises RequestError if a value is not allowed."""
    for name, default, rule in checks:
        value = getattr(params, name)
        if value is not default:
            setattr(params, name, rule(name, value))


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise a RequestError that names the parameter, its value and what is allowed."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS:
        shown = shown[:_SHOWN_CHARS] + "…"
    raise RequestError(f"{name}={shown} is not valid: it must be {allowed}", param=name, value=value)


def whole(name: str, value: Any, low: int, high: int, allowed: str) -> int:
    """A whole number; booleans and fractions are not."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool):
        refuse(name, value, allowed)
    try:
        number = operator.index(value)  # numpy's integers too
    except TypeError:
        refuse(name, value, allowed)
    if not low <= number <= high:
        refuse(name, value, allowed)
    return number


def real(name: str, value: Any, low: float, high: float, allowed: str) -> float:
    """A finite number (NaN fails every comparison)."""
    if type(value) is float and low <= value <= high:
        return value
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        refuse(name, value, allowed)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        refuse(name, value, allowed)
    if not (low <= number <= high and math.isfinite(number)):
        refuse(name, value, allowed)
    return number


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if value is not True and value is not False:
        refuse(name, value, "true or false")
    return value


def text(name: str, value: Any, most: int) -> str:
    """A string that is not empty or too long."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        refuse(name, value, f"text of 1 to {most} characters")
    return value


def items(name: str, value: Any, most: int, kind: str) -> list[Any]:
    """A list or tuple of at most `most` entries, copied into a new list."""
    if not is_sequence(value):
        refuse(name, value, f"a list of {kind}")
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries; at most {most} are allowed", param=name)
    return list(value)


def texts(name: str, value: Any, most: int, most_chars: int) -> list[str]:
    """A list of strings, none of them empty or too long."""
    found = items(name, value, most, "strings")
    for item in found:
        if not isinstance(item, str) or not 0 < len(item) <= most_chars:
            refuse(name, item, f"strings of 1 to {most_chars} characters")
    return found


def token_ids(name: str, value: Any, most: int) -> list[int]:
    """A list of token ids; whether the vocabulary has them is checked where it is known."""
    found = items(name, value, most, "token ids")
    return [whole(name, item, 0, _INT64 - 1, "token ids, whole numbers from 0") for item in found]


def functions(name: str, value: Any, most: int) -> list[Callable[..., Any]]:
    """A list of things to call."""
    found = items(name, value, most, "functions")
    for item in found:
        if not callable(item):
            refuse(name, item, "functions")
    return found


def instance(name: str, value: Any, kind: type[T]) -> T | None:
    """An object of a class, or None."""
    if value is not None and not isinstance(value, kind):
        refuse(name, value, f"{kind.__name__}, or None")
    return value


def one_of(name: str, value: Any, words: tuple[str, ...], allowed: str) -> str:
    """One of some words."""
    if value not in words:
        refuse(name, value, allowed)
    return value


# --- rules ---


def whole_rule(low: int, high: int, allowed: str = "") -> Rule:
    """A whole number in a range; `allowed` describes the range if its limits are not enough."""
    told = allowed or f"a whole number from {low} to {high}"
    return lambda name, value: whole(name, value, low, high, told)


def real_rule(low: float, high: float, allowed: str = "") -> Rule:
    """A number in a range; `allowed` describes the range if its limits are not enough."""
    told = allowed or f"a number from {low:g} to {high:g}"
    return lambda name, value: real(name, value, low, high, told)


def or_none(rule: Rule) -> Rule:
    """As `rule`; None is allowed too."""
    return lambda name, value: None if value is None else rule(name, value)


def without(none: int, rule: Rule) -> Rule:
    """As `rule`; the number `none` means None."""
    return lambda name, value: None if (checked := rule(name, value)) == none else checked
