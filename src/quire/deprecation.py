"""What is going to be removed, and what takes its place: one way to say so. The promise is in docs/stability.md.

A name works and warns in two minor versions, and may be gone in the next.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])

KEPT_FOR = 2
"""Minor versions."""


class QuireDeprecationWarning(FutureWarning):
    """A name of Quire will go. Python shows it by default, since its reader is the one who must change something."""


def deprecated(*, since: str, use: str) -> Callable[[T], T]:
    """Mark a function, method or class as deprecated: it works, and warns its caller.

    Args:
        since: the first version that warns, for example `0.2`.
        use: the successor, as its user writes it.
    """

    def mark(target: T) -> T:
        message = describe(f"{target.__module__}.{target.__qualname__}", since=since, use=use)
        called: Callable[..., Any] = target.__init__ if inspect.isclass(target) else target

        @functools.wraps(called)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, QuireDeprecationWarning, stacklevel=2)
            return called(*args, **kwargs)

        result = target if inspect.isclass(target) else warning
        if inspect.isclass(target):
            setattr(target, "__init__", warning)  # noqa: B010
        setattr(result, "__deprecated__", message)  # noqa: B010
        return cast(T, result)

    return mark


def warn_deprecated(name: str, *, since: str, use: str) -> None:
    """Warn of something that cannot be marked: a setting, a field, an attribute of a module (in its `__getattr__`). The warning
    points at the caller of the function that calls this."""
    warnings.warn(describe(name, since=since, use=use), QuireDeprecationWarning, stacklevel=3)


def describe(name: str, *, since: str, use: str) -> str:
    """The warning's text, with the version in which the name goes."""
    return f"{name} is deprecated since Quire {since} and will be removed in {removed_in(since)}: use {use}"


def removed_in(since: str) -> str:
    """The version in which a name goes that was deprecated in `since`."""
    major, minor = map(int, since.split(".")[:2])
    return f"{major}.{minor + KEPT_FOR}"
