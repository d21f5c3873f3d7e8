"""The things that patches change: finding one by its path, telling its signature, and making what takes its place.

Knows nothing of processes, and changes nothing.
"""

import functools
import hashlib
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.patch.declaration import Target

MISSING: Any = object()
"""The value of a name that does not exist."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TOLD = ("__init__", "__new__", "__call__")


class Place(NamedTuple):
    """Where a name is.

    Attributes:
        owner: the module or class in whose own dictionary the name is, or would be.
        value: as it is in there (a `staticmethod`, not its function); `MISSING` if it is not.
    """

    owner: Any
    name: str
    value: Any

    def put(self, value: Any) -> None:
        """Give the name a value; `MISSING` takes it away."""
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class TargetError(Exception):
    """A target that cannot be patched as the patch asks; the message says why."""


def locate(path: str) -> Place:
    """Where a path leads; imports its module.

    Raises:
        TargetError: the module, or the class that would have the name, does not exist.
    """
    module, _, qualname = path.partition(":")
    *outer, name = qualname.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = vars(owner)[part]
    except (ImportError, KeyError, TypeError) as error:
        raise TargetError(f"{path} does not exist: {type(error).__name__}: {error}") from None
    return Place(owner, name, vars(owner).get(name, MISSING) if hasattr(owner, "__dict__") else MISSING)


def load(path: str) -> Any:
    """What a path names.

    Raises:
        TargetError: it does not exist.
    """
    place = locate(path)
    if place.value is MISSING:
        raise TargetError(f"{path} does not exist")
    return place.value


def describe_signature(value: Any) -> str:
    """What a patch relies on: parameters (names, kinds, defaults) of a function, and of the methods of a class; the type and the
    value of a constant."""
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {describe_signature(value.__func__)}"
    if isinstance(value, property):
        return f"property {describe_signature(value.fget)}"
    if inspect.isclass(value):
        names = [name for name in sorted(vars(value)) if name in _TOLD or not name.startswith("__")]
        members = [(name, vars(value)[name]) for name in names if _has_parameters(vars(value)[name])]
        bases = ", ".join(base.__qualname__ for base in value.__bases__)
        return "; ".join((f"class({bases})", *(f"{name} {describe_signature(each)}" for name, each in members)))
    if callable(value):
        kind = "async " if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) else ""
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):  # written in another language
            return f"{kind}{type(value).__qualname__}"
        return f"{kind}({', '.join(map(_describe_parameter, parameters))})"
    return f"{type(value).__qualname__} {_describe_value(value)}".rstrip()


def hash_signature(value: Any) -> str:
    """Twelve digits that stand for `describe_signature`."""
    return hashlib.sha256(describe_signature(value).encode()).hexdigest()[:12]


def _has_parameters(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, property))


def _describe_parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f"={_describe_value(parameter.default) or '…'}"
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**", parameter.KEYWORD_ONLY: "--"}
    return f"{stars.get(parameter.kind, '')}{parameter.name}{default}"


def _describe_value(value: Any) -> str:
    """Plain values and tuples and lists of these; of others nothing, since their texts may have addresses."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_describe_value, value))}]"
    return repr(value) if type(value) in _PLAIN else ""


# --- what takes its place ---


def check_original(target: Target, value: Any) -> str | None:
    """What is wrong with the present value of a target; None: it is as the patch expects."""
    if target.kind == "add":
        return None if value is MISSING else f"{target.path} exists already: the patch may be needless"
    if value is MISSING:
        return f"{target.path} does not exist"
    found = hash_signature(value)
    if found == target.signature:
        return None
    return f"{target.path} has changed: its signature is {describe_signature(value)} ({found}, not {target.signature})"


def make_substitute(target: Target, place: Place) -> Any:
    """The object that takes the place of a target.

    Raises:
        TargetError: the two do not fit, or `by` is not found in its module under its own name.
    """
    by = load(target.by)
    _check_plain(target, by)
    original = place.value
    if target.kind in ("constant", "add"):
        return by
    if inspect.isclass(original):
        if target.kind == "replace" and inspect.isclass(by):
            return by
        raise TargetError(f"{target.path} is a class: replace it by a class, or wrap its methods")
    if not inspect.isfunction(by):
        raise TargetError(f"{target.by} must be a function, as {target.path} is")
    make = functools.partial(_wrap, by) if target.kind == "wrap" else lambda _: by
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(make(original.__func__))
    if isinstance(original, property):
        return original.getter(make(original.fget))
    if not callable(original):
        raise TargetError(f"{target.path} is no function: change it with kind='constant'")
    return make(original)


def _wrap(by: Callable[..., Any], original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    async def call_and_wait(*args: Any, **kwargs: Any) -> Any:
        return await by(original, *args, **kwargs)

    wrapper = functools.wraps(original)(call_and_wait if inspect.iscoroutinefunction(by) else call)
    # Under the original's name it could be pickled, and would be the original again in a process that has no patches.
    wrapper.__module__, wrapper.__qualname__ = by.__module__, by.__qualname__
    return wrapper


def _check_plain(target: Target, by: Any) -> None:
    """A process that is spawned finds a function by its name, or gets another one without a word."""
    if not isinstance(by, types.FunctionType) and not inspect.isclass(by):
        return
    own = f"{by.__module__}:{by.__qualname__}"
    has_more = getattr(by, "__closure__", None) is not None or hasattr(by, "__wrapped__")
    if own != target.by or has_more:
        what = f"calls itself {own}" if own != target.by else "wraps another function"
        raise TargetError(f"{target.by} must be a plain function or class of its module, and {what}")
