"""What a setting is: a field of a dataclass with a default, the values that it may have, a help text and other names.

Knows values, by themselves. Knows nothing of which settings there are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from quire.errors import ConfigError, did_you_mean
from quire.guards import is_mapping, is_sequence
from quire.plugins.registry import Registry

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Check:
    """What a value must be.

    Attributes:
        allowed: in words, for the error.
        passes: whether a value is that.
        words: the allowed words; an error suggests the nearest one.
        is_object: the value is a dict; a config object is converted to one.
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
        """Raise a ConfigError that names setting, value and what is allowed, if the value is not. `name` of a key of an object is
        `setting.key`."""
        if self.passes(value):
            return
        allowed = self.allowed + did_you_mean(str(value), self.words)
        raise ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", setting=name.partition(".")[0])


def setting(default: T, check: Check, text: str = "", *, aliases: tuple[str, ...] = (), is_secret: bool = False) -> T:
    """A field of a dataclass of settings.

    Args:
        check: what the value must be; None is allowed too if it is the default.
        text: the help.
        aliases: other names of the setting, as keywords and as flags.
        is_secret: the value is left out of the `repr`.
    """
    metadata = {"check": check.or_none() if default is None else check, "help": text, "aliases": aliases}
    made: Any = dataclasses.field(default=default, metadata=metadata, repr=not is_secret)
    if isinstance(default, dict):
        made = dataclasses.field(default_factory=dict[str, Any], metadata=metadata)
    return made


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, made anew if there is a factory."""
    return field.default_factory() if callable(field.default_factory) else field.default


def aliases_of(settings: Any) -> dict[str, str]:
    """Alias to the name of its field, for a dataclass of settings."""
    return {alias: field.name for field in dataclasses.fields(settings) for alias in field.metadata["aliases"]}


def accept_aliases(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass of settings: its constructor takes aliases, too."""
    generated: Any = cls.__init__
    aliases = aliases_of(cls)

    @functools.wraps(generated)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        for alias in kwargs.keys() & aliases.keys():
            field, value = aliases[alias], kwargs.pop(alias)
            if kwargs.setdefault(field, value) != value:
                message = f"{alias}={value!r} and {field}={kwargs[field]!r} are one setting: give only {field}"
                raise ConfigError(message, setting=field)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def check_keys(setting: str, given: Iterable[str], known: Iterable[str], aliases: Iterable[str] = ()) -> None:
    """Raise a ConfigError for the first key of an object that is neither known nor an alias."""
    for key in given:
        if key not in known and key not in aliases:
            hint = did_you_mean(key, [*known, *aliases], "{}", f"known: {', '.join(sorted(known))}")
            raise ConfigError(f"{setting} has {key!r}, which is not known; {hint}", setting=setting)


def read_object(kind: type[T], setting: str, given: Mapping[str, Any] | None) -> T:
    """A setting that is an object, as a dataclass whose fields are made by `setting`. A key that is None is at its default.
    Raises ConfigError for a key or a value that is not allowed."""
    of_kind: Any = kind
    fields = {field.name: field for field in dataclasses.fields(of_kind)}
    aliases = aliases_of(kind)
    asked = {key: value for key, value in (given or {}).items() if value is not None}
    check_keys(setting, asked, fields, aliases)
    values = {aliases.get(key, key): value for key, value in asked.items()}
    for name, value in values.items():
        fields[name].metadata["check"](f"{setting}.{name}", value)
    return kind(**values)


# --- what values must be ---


def whole(minimum: int, maximum: int | None = None) -> Check:
    top = f" to {maximum}" if maximum is not None else " or more"
    most = math.inf if maximum is None else maximum
    return Check(
        f"a whole number, {minimum}{top}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= most,
    )


def whole_or(word: str, instead: int, minimum: int, maximum: int) -> Check:
    """A whole number, or a word; the number `instead` means the same as the word."""
    numbers = whole(minimum, maximum)
    return Check(
        f"{numbers.allowed}, or {word} ({instead})",
        lambda value: value == word or (value == instead and not isinstance(value, bool)) or numbers.passes(value),
        (word,),
    )


def number(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """A finite number in a range; with `above`, greater than the minimum."""
    low = f"above {minimum:g}" if above else f"at least {minimum:g}"

    def passes(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return minimum <= value <= maximum and not (above and value == minimum)

    return Check(f"a number {low}" + (f" and at most {maximum:g}" if math.isfinite(maximum) else ""), passes)


def number_or(word: str, minimum: float) -> Check:
    """A finite number from a minimum, or a word."""
    numbers = number(minimum)
    return Check(f"{numbers.allowed}, or {word}", lambda value: value == word or numbers.passes(value), (word,))


def one_of(*words: str) -> Check:
    return Check(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words, words)


def registered(table: Registry[Any], *others: str, paths: bool = False) -> Check:
    """A name of a registry, to which plugins may add, or another word; with `paths`, also a class path `module:Class`."""
    words = (*others, *table)
    allowed = f"one of {', '.join(words)}, a plugin's name{', or a class path module:Class' if paths else ''}"
    return Check(
        allowed,
        lambda value: isinstance(value, str) and (value in others or value in table or (paths and ":" in value)),
        words,
    )


def mapping(*words: str, function: bool = False) -> Check:
    """A dict with string keys, or one of some words; with `function`, also a function."""
    others = "".join(f" or {word}" for word in (*words, *(["a function"] if function else [])))
    return Check(
        f"a dict with string keys{others}",
        lambda value: (
            (function and callable(value))
            or (isinstance(value, str) and value in words)
            or (is_mapping(value) and all(isinstance(key, str) for key in value))
        ),
        words,
        is_object=True,
    )


def class_path(*words: str) -> Check:
    """A class, its path (`package.module:Class`), or one of some words."""
    known = f"one of {', '.join(words)}, " if words else ""
    return Check(
        f"{known}a class, or a class path such as 'package.module:Class'",
        lambda value: value in words or names_class(value),
    )


def names_class(value: Any) -> bool:
    """Whether a value is a class or looks like the path of one."""
    return isinstance(value, type) or (isinstance(value, str) and (":" in value or "." in value))


def strings(allowed: str) -> Check:
    """A string that is not empty, a list of such strings, or None."""

    def passes(value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value != ""
        return is_sequence(value) and all(isinstance(item, str) and item for item in value)

    return Check(allowed, passes)


FLAG = Check("True or False", lambda value: isinstance(value, bool))
TEXT = Check("a string", lambda value: isinstance(value, str))
