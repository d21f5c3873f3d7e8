"""Everybody who holds an object: giving them another one in its place.

Modules that took a name with `from … import`, registries, classes and closures each have their own reference, and go on with the
original until it is changed there too. Knows nothing of patches.
"""

import ast
import gc
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_PASSED_OVER = (types.FrameType, types.GeneratorType, types.CoroutineType)


class Rebound(NamedTuple):
    """Where an object was replaced, and what holds it still, as texts."""

    reached: tuple[str, ...]
    left: tuple[str, ...]


def rebind(original: Any, substitute: Any, spared: list[Any], home: str = "") -> Rebound:
    """Put `substitute` in the place of `original` wherever that is held.

    Args:
        spared: objects that keep the original: the substitute's own parts.
        home: module that keeps it; the substitute's, which may call the original by a name of its own.
    """
    reached: list[str] = []
    left: list[str] = []
    kept = {id(each) for each in _parts(substitute, [*spared, spared])}
    if home in sys.modules:
        kept.add(id(vars(sys.modules[home])))
    kept |= {id(each) for each in _own(original)}
    for holder in gc.get_referrers(original):
        if id(holder) in kept or isinstance(holder, _PASSED_OVER):
            continue
        where = _change(holder, original, substitute)
        (left if where is None else reached).append(where or _name(holder, original))
    return Rebound(tuple(sorted(set(reached))), tuple(sorted(set(left))))


def _parts(substitute: Any, more: list[Any]) -> Iterator[Any]:
    """The substitute, its descriptors' functions, and the containers of these."""
    functions = [substitute, *(getattr(substitute, name, None) for name in ("__func__", "fget"))]
    for each in functions:
        yield each
        yield getattr(each, "__dict__", None)
        yield from getattr(each, "__closure__", None) or ()
    yield from more


def _own(original: Any) -> Iterator[Any]:
    """What an object consists of and refers back to it: a class's ancestry and methods."""
    yield getattr(original, "__dict__", None)
    if isinstance(original, type):
        yield original.__mro__
        for each in vars(original).values():
            yield each
            for function in (each, getattr(each, "__func__", None), getattr(each, "fget", None)):
                yield from getattr(function, "__closure__", None) or ()


def _change(holder: Any, original: Any, substitute: Any) -> str | None:
    """Replace it in one holder; where that was, or None if it cannot be done."""
    if isinstance(holder, dict):
        return _change_dict(holder, original, substitute)
    if isinstance(holder, list):
        holder[:] = [substitute if each is original else each for each in holder]
        return "a list"
    if isinstance(holder, types.CellType):
        holder.cell_contents = substitute
        return "a closure"
    return _change_fields(holder, original, substitute)


def _name(holder: Any, original: Any) -> str:
    """What holds it still, for a message."""
    if isinstance(holder, tuple) and isinstance(original, type):
        below = [each.__qualname__ for each in original.__subclasses__() if holder in (each.__mro__, each.__bases__)]
        return f"the subclass {below[0]}" if below else "a tuple"
    if isinstance(original, type) and isinstance(holder, original):
        return "an object of the class"
    return f"a {type(holder).__qualname__}"


def _change_dict(holder: dict[Any, Any], original: Any, substitute: Any) -> str | None:
    names = [name for name, value in holder.items() if value is original]
    owner = next((each for each in gc.get_referrers(holder) if _has_dict(each, holder, names)), None)
    for name in names:
        if isinstance(owner, type):
            setattr(owner, name, substitute)  # a class caches what it has
        else:
            holder[name] = substitute
    if not names:
        return None  # it is a key
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}:{names[0]}"
    return (
        f"{owner.__module__}:{owner.__qualname__}.{names[0]}" if isinstance(owner, type) else f"a dict ({names[0]!r})"
    )


def _has_dict(each: Any, holder: dict[Any, Any], names: list[Any]) -> bool:
    if isinstance(each, type):
        return bool(names) and vars(each).get(names[0]) is holder[names[0]] and len(vars(each)) == len(holder)
    return isinstance(each, types.ModuleType) and vars(each) is holder


def _change_fields(holder: Any, original: Any, substitute: Any) -> str | None:
    """Of an object with fields, frozen or not."""
    names = [*getattr(holder, "__dict__", ()), *_slots(type(holder))]
    if isinstance(holder, type | types.FunctionType | types.MethodType | staticmethod | classmethod | property):
        return None
    found = [name for name in names if getattr(holder, name, None) is original]
    try:
        for name in found:
            object.__setattr__(holder, name, substitute)
    except (AttributeError, TypeError):
        return None
    return f"{type(holder).__qualname__}.{found[0]}" if found else None


def _slots(cls: type) -> list[str]:
    return [name for each in cls.__mro__ for name, value in vars(each).items() if inspect.ismemberdescriptor(value)]


# --- values that are shared by chance ---


def rebind_imports(module: str, name: str, original: Any, substitute: Any) -> Rebound:
    """As `rebind`, for a value such as a number, which others hold without having it from here: only the modules whose text says
    `from module import name` get the substitute."""
    reached: list[str] = []
    for other in list(sys.modules.values()):
        fields = getattr(other, "__dict__", None)
        if not isinstance(fields, dict) or other.__name__ == module:
            continue
        if any(value is original for value in list(fields.values())):
            for local in _names_of(other, module, name):
                if fields.get(local) is original:
                    fields[local] = substitute
                    reached.append(f"{other.__name__}:{local}")
    return Rebound(tuple(sorted(reached)), ())


def _names_of(importer: types.ModuleType, module: str, name: str) -> list[str]:
    """What a module calls a name that it imports from another."""
    try:
        text = inspect.getsource(importer)
    except (OSError, TypeError):
        return []
    if name not in text:
        return []
    package = importer.__package__ or ""
    return [
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and absolute_name(node, package) == module
        for alias in node.names
        if alias.name == name
    ]


def absolute_name(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from … import` in a module of `package` names."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
