"""A stand-in for torch in processes that only compile: kernels can be imported in 0.3 s instead of 3, and compile to the same.

Modules that hold kernels name torch in annotations, defaults and tables; a kernel itself cannot. So every name of torch is
there, and is nothing. What needs more fails to import, and is then imported with the real one.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


class Nothing:
    """Any name of torch: may be called, indexed, united with a type, and derived from."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        value = Nothing(f"{self._name}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """A decorator gives back what it decorates."""
        is_decorator = len(arguments) == 1 and not settings and callable(arguments[0])
        return arguments[0] if is_decorator else Nothing(f"{self._name}()")

    def __or__(self, other: Any) -> "Nothing":
        return self

    __ror__ = __or__

    def __getitem__(self, index: Any) -> "Nothing":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __repr__(self) -> str:
        return self._name


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Nothing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        is_torch = fullname == "torch" or fullname.startswith("torch.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_torch else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


_finder = _Finder()


def install() -> None:
    """From now on `import torch` gives the stand-in."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _finder)


def remove(packages: Sequence[str]) -> bool:
    """Forget the stand-in, and every module of these packages that was imported with it; whether there was one."""
    if _finder not in sys.meta_path:
        return False
    sys.meta_path.remove(_finder)
    stale = [name for name in sys.modules if f"{name}.".startswith(("torch.", *packages)) and name != __name__]
    for name in stale:
        del sys.modules[name]
    return True
