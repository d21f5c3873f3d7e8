"""Settings that users of vLLM know and Quire does not have yet, other spellings of those it has, and the wrapper that
turns an unknown keyword into an error that helps.

A setting in the table is accepted at its default, so that existing scripts run; any other value is refused, never
silently ignored.
"""

import dataclasses
import difflib
import functools
from typing import Any, TypeVar

from quire.errors import ConfigError

T = TypeVar("T")

ALIASES = {
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "scheduler_delay_factor": "delay_factor",
    "max_num_queued_reqs": "max_num_waiting",
    "max_num_queued_tokens": "max_waiting_tokens",
    "device_memory_utilization": "gpu_memory_utilization",
}
"""Another spelling to the field's own name."""

_EMPTY = (None, {}, [], "", False, 0)

UNAVAILABLE: dict[str, tuple[Any, ...]] = {}


def refuse_unknown(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass: keywords that are not fields are checked, with a message that helps."""
    generated = cls.__init__
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(generated)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name not in names]:
            value = kwargs.pop(name)
            if name in ALIASES:
                _use_alias(kwargs, name, value)
            else:
                check_unavailable(name, value, names)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _use_alias(kwargs: dict[str, Any], name: str, value: Any) -> None:
    field = ALIASES[name]
    if field in kwargs and kwargs[field] != value:
        raise ConfigError(
            f"{name}={value!r} and {field}={kwargs[field]!r} are one setting: give only {field}", setting=field
        )
    kwargs[field] = value


def check_unavailable(name: str, value: Any, known: set[str]) -> None:
    """Accept a setting that Quire does not have where it is at its default.

    Raises:
        ConfigError: another value, or a name that nobody knows.
    """
    if name in UNAVAILABLE:
        defaults = UNAVAILABLE[name]
        if any(type(value) is type(default) and value == default for default in defaults):
            return
        raise ConfigError(
            f"{name}={value!r} is not available yet in Quire; leave it out (accepted: "
            f"{', '.join(repr(default) for default in defaults)})",
            setting=name,
        )
    near = difflib.get_close_matches(name, [*known, *ALIASES, *UNAVAILABLE], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name!r} is not an engine setting{hint}", setting=name)
