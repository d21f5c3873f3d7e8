"""What an engine setting may be, taken by itself: types, ranges, allowed words. One error form.

Knows values. Knows nothing of the model or the device; what depends on those is checked where it is resolved.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

from quire.config.resolve import DTYPE_NAMES
from quire.errors import ConfigError, did_you_mean
from quire.guards import is_mapping, is_sequence

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Check:
    """What a value must be.

    Attributes:
        allowed: in words, for the error.
        passes: whether a value is that.
        words: the allowed words; an error guesses which of them was meant.
        is_object: it is a dict; a config object is taken as one.
    """

    allowed: str
    passes: Callable[[Any], bool]
    words: tuple[str, ...] = ()
    is_object: bool = False

    def or_none(self) -> "Check":
        if self.passes(None):
            return self
        allowed = "True, False or None" if self is FLAG else f"{self.allowed}, or None"
        return Check(allowed, lambda value: value is None or self.passes(value), self.words, self.is_object)

    def __call__(self, name: str, value: Any) -> None:
        """Refuse another value. Raises ConfigError: it is not allowed; the message names setting, value and what is."""
        if self.passes(value):
            return
        allowed = self.allowed + did_you_mean(str(value), self.words)
        raise ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", setting=name)


def setting(default: T, check: Check, text: str) -> T:
    """A field of a dataclass of settings: its default, what it may be (None, too, where that is the default), its help."""
    metadata = {"check": check.or_none() if default is None else check, "help": text}
    made: Any = dataclasses.field(default=default, metadata=metadata, repr=check is not TOKEN)
    if isinstance(default, dict):
        made = dataclasses.field(default_factory=dict[str, Any], metadata=metadata)
    return made


def check(args: Any) -> None:
    """Check every field of a dataclass of settings by itself. Raises ConfigError: the first that is not valid."""
    for field in dataclasses.fields(args):
        field.metadata["check"](field.name, getattr(args, field.name))


def whole(minimum: int, maximum: int | None = None) -> Check:
    top = f" to {maximum}" if maximum is not None else " or more"
    most = math.inf if maximum is None else maximum
    return Check(
        f"a whole number, {minimum}{top}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= most,
    )


def whole_or(word: str, instead: int, minimum: int, maximum: int) -> Check:
    """A whole number, or a word (or a number that means the same)."""
    numbers = whole(minimum, maximum)
    return Check(
        f"{numbers.allowed}, or {word} ({instead})",
        lambda value: value == word or (value == instead and not isinstance(value, bool)) or numbers.passes(value),
        (word,),
    )


def number(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """A finite number in a range; `above` leaves the minimum out."""
    low = f"above {minimum:g}" if above else f"at least {minimum:g}"

    def passes(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return minimum <= value <= maximum and not (above and value == minimum)

    return Check(f"a number {low}" + (f" and at most {maximum:g}" if math.isfinite(maximum) else ""), passes)


def one_of(*words: str) -> Check:
    return Check(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words, words)


def mapping(*, function: bool = False) -> Check:
    """A dict with string keys; with `function`, also something to call."""
    return Check(
        f"a dict with string keys{' or a function' if function else ''}",
        lambda value: (
            (function and callable(value)) or (is_mapping(value) and all(isinstance(key, str) for key in value))
        ),
        is_object=True,
    )


def class_path(*words: str) -> Check:
    """A class, its path (`package.module:Class`), or one of some words."""
    known = f"one of {', '.join(words)}, " if words else ""
    return Check(
        f"{known}a class, or a class path such as 'package.module:Class'",
        lambda value: value in words or _names_class(value),
    )


def _names_class(value: Any) -> bool:
    return isinstance(value, type) or (isinstance(value, str) and (":" in value or "." in value))


def strings(allowed: str) -> Check:
    """A list of strings that are not empty, a single one, or None."""

    def passes(value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value != ""
        return is_sequence(value) and all(isinstance(item, str) and item for item in value)

    return Check(allowed, passes)


FLAG = Check("True or False", lambda value: isinstance(value, bool))
TEXT = Check("a string", lambda value: isinstance(value, str))
TOKEN = Check("a token, or True for the stored one", lambda value: isinstance(value, str | bool))
PROCESSORS = Check(
    "a list of classes or of class paths such as 'package.module:Class'",
    lambda value: is_sequence(value) and all(_names_class(item) for item in value),
)
DTYPE = Check(
    f"one of auto, {', '.join(DTYPE_NAMES)}",
    lambda value: str(value).removeprefix("torch.") in ("auto", *DTYPE_NAMES),  # torch's own object has such a name
)
"""Whoever uses it checks it."""
