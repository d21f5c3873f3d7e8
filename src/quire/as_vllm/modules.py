"""The modules `vllm…`, made when they are imported: a name in them is Quire's name of the table.

Knows Python's import system. Knows nothing of what the names mean.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import CodeType, ModuleType
from typing import Any

from quire import envs
from quire.as_vllm.names import MODULES, PROGRAMS, why_absent
from quire.logger import init_logger

logger = init_logger(__name__)

_ALL = {*MODULES, *PROGRAMS}
_PACKAGES = {name.rsplit(".", count)[0] for name in _ALL for count in range(1, name.count(".") + 1)} | {"vllm"}


def install() -> None:
    """From here on `import vllm…` gives these modules, in this process. May be called twice."""
    envs.set_default("QUIRE_AS_VLLM", "1")
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = _Module("vllm")
    module.__spec__ = _Finder().find_spec("vllm")
    sys.modules["vllm"] = module


class _Module(ModuleType):
    """A module of vLLM's, whose names are looked up when they are asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Quire's names of vLLM's module {name}.")
        if name in _PACKAGES:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name.startswith("__") and name not in ("__version__", "__version_tuple__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if full in _ALL or full in _PACKAGES:
            return importlib.import_module(full)
        for source in MODULES.get(self.__name__, ()):
            found = getattr(importlib.import_module(source), name, None)
            if found is not None and not isinstance(found, ModuleType):
                return found
        logger.warning_once("%s is not in Quire: %s", full, why_absent(full))
        raise AttributeError(f"{full} is not in Quire: {why_absent(full)}")

    def __dir__(self) -> list[str]:
        names = {name for source in MODULES.get(self.__name__, ()) for name in dir(importlib.import_module(source))}
        return sorted(name for name in names if not name.startswith("_"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in _ALL or fullname in _PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, origin="Quire", is_package=fullname in _PACKAGES)
        if fullname.startswith("vllm.") and not fullname.endswith(".__main__"):
            logger.warning_once("%s is not in Quire: %s", fullname, why_absent(fullname))
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        words = PROGRAMS.get(fullname)
        if words is None:
            return None
        source = f"import sys\nfrom quire.entrypoints.cli.main import main\nsys.exit(main([*{words!r}, *sys.argv[1:]]))"
        return compile(source, fullname, "exec")

    def is_package(self, fullname: str) -> bool:
        return fullname in _PACKAGES
