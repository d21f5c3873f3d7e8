"""The errors that Quire raises on purpose, and values with their reasons. Each message names the field or setting at fault, the
value seen, and the way out.

Knows nothing of HTTP: `status` is only a hint that a server may use.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Generic, Self, TypeVar

__all__ = [
    "CapacityError",
    "ConfigError",
    "DeadlineError",
    "EngineDeadError",
    "EngineError",
    "Explained",
    "NotFoundError",
    "NotSupportedError",
    "QuireError",
    "RequestError",
    "ShutdownError",
    "T",
    "TooLongError",
    "check_all",
    "describe",
    "did_you_mean",
    "instead_of",
    "nearest",
]  # `refusing` is for this project's own use

T = TypeVar("T")


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""

    status: int = 500


class ConfigError(QuireError, ValueError):
    """A setting that cannot work; raised before anything is built."""

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.parts: tuple[ConfigError, ...] = (self,)

    @classmethod
    def of(cls, setting: str, why: str) -> Self:
        """`setting: why`."""
        return cls(f"{setting}: {why}", setting=setting)

    @staticmethod
    def raise_all(errors: "Sequence[ConfigError]") -> None:
        """Raise one error for all that is wrong: its message has a line for each, and so have its `parts`. Nothing for none."""
        if len(errors) == 1:
            raise errors[0]
        if errors:
            together = ConfigError("\n".join(map(str, errors)), setting=errors[0].setting)
            together.parts = tuple(errors)
            raise together


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run all checks; raise one ConfigError for those that fail."""
    errors: list[ConfigError] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            errors += error.parts
    ConfigError.raise_all(errors)


class RequestError(QuireError, ValueError):
    """A client's fault: the request is refused, the engine goes on.

    Args:
        message: one sentence for the client.
        param: the request field at fault, as the client wrote it.
        value: what the client gave there, where one value is at fault.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.param = param
        self.value = value

    @property
    def parameter(self) -> str | None:
        """`param`, as users of vLLM know it."""
        return self.param


class NotFoundError(RequestError):
    """The thing named in the request does not exist (a model, a stored response)."""

    status = 404


class NotSupportedError(RequestError):
    """Something of a request that the engine cannot do yet, or this model cannot."""


class TooLongError(RequestError):
    """The prompt has more tokens than the model can read."""


class CapacityError(QuireError):
    """No room now: try again after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(QuireError):
    """The request did not end in the time that it, or the operator, allows; or it is certain that it will not."""

    status = 504


class EngineError(QuireError):
    """Ours: the engine failed, through no fault of the request."""


class EngineDeadError(EngineError):
    """The engine core has ended and does not answer any more."""

    status = 503


class ShutdownError(EngineError):
    """The request was cut off because its server ends; another one may answer it."""

    status = 503


@contextlib.contextmanager
def refusing(
    *kinds: type[Exception], what: str = "", setting: str = "", param: str = ""
) -> Generator[None, None, None]:
    """What is raised within becomes an error that names the setting, or the request's field, and says `what` cannot be."""
    try:
        yield
    except kinds as error:
        message = f"{what}: {error}" if what else str(error)
        refusal = ConfigError(message, setting=setting) if setting else RequestError(message, param=param)
        raise refusal from error


def describe(error: BaseException) -> str:
    """An error's message; an error that Quire did not raise on purpose is named with its class."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most like this one, if one is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word[:200], known, 1, cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], form: str = " ({})", otherwise: str = "", cutoff: float = 0.6) -> str:
    """The part of a message that names the known word which may have been meant; `form` says how it is joined to the rest."""
    near = nearest(word, known, cutoff)
    return otherwise if near is None else form.format(f"did you mean {near!r}?")


def instead_of(name: str, holder: Mapping[str, object], most: int = 100) -> str:
    """The end of a sentence that says that `name` is missing: what the object (its first names) has in its place."""
    near = nearest(name, [key[:60] for key in itertools.islice(holder, most)])
    return f" (this object has {near!r})" if near not in (None, name) else ""


@dataclasses.dataclass(frozen=True)
class Explained(Generic[T]):
    """A value with its reason; `quire explain` prints both."""

    value: T
    why: str
