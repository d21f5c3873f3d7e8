"""Checks of a request's parameters: each returns the value in its normal form, or raises a `RequestError` that names the
parameter, the value and what is allowed.

The common case (right type, in range) costs one type test and one comparison: parameters are made for every request.
"""

import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from quire.errors import RequestError, did_you_mean
from quire.guards import is_sequence

_SHOWN_CHARS = 100
_INT64 = 1 << 63


_UNKNOWN = re.compile(r"Unexpected keyword argument '(\w+)'")
_GIVEN_UP = {
    "guided_": "use structured_outputs=StructuredOutputsParams(…)",
    "use_beam_search": "use LLM.beam_search with BeamSearchParams",
    "best_of": "use n, and choose among the outputs",
}
"""Names of older releases of vLLM, or how they begin, and what there is instead."""


class ParamsMeta(msgspec.StructMeta):
    """Metaclass of parameters: an unknown keyword is a TypeError that says which one was probably meant."""

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


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise in the one form that these errors have."""
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


def flag(name: str, value: Any) -> None:
    """True or False."""
    if value is not True and value is not False:
        refuse(name, value, "true or false")


def items(name: str, value: Any, most: int, kind: str) -> list[Any]:
    """A list (or tuple) of at most so many entries, as a list of the request's own."""
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
