"""A hook that is called right after a module was imported, before its importer can copy a name of it.

Knows import machinery. Knows nothing of patches.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls `after_import` with each watched module when it has been imported, whoever imports it, and again after a reload.

    It is asked for every import of this process; of others than the watched ones it knows nothing and says so at once.
    """

    def __init__(self, after_import: Callable[[types.ModuleType], None]) -> None:
        self._after_import = after_import
        self._watched: set[str] = set()

    def watch(self, module: str) -> None:
        """From now on this module is one of them. The first one puts the hook in its place."""
        self._watched.add(module)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take it out again."""
        self._watched.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders find, with a loader that calls the hook."""
        if fullname not in self._watched:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._after_import)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, and a call behind it."""

    def __init__(self, inner: Any, after_import: Callable[[types.ModuleType], None]) -> None:
        self._inner, self._after_import = inner, after_import

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._after_import(module)


def module_exists(name: str) -> bool:
    """Whether a module can be found. Imports nothing, not even its packages."""
    if name in sys.modules:
        return True
    places: Any = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        loaded = sys.modules.get(package)
        if loaded is not None:
            places = getattr(loaded, "__path__", [])
            continue
        spec = _find(package, places)
        if spec is None:
            return False
        places = spec.submodule_search_locations or []
    return True


def _find(name: str, places: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, ImportHook) and (spec := finder.find_spec(name, places)) is not None:
            return spec
    return None
