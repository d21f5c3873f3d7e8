"""Put on a Python's path by tests: of the installed packages only those of CORE_MODULES can be found.

So a process sees what the README's installation has, though the developers' packages lie beside them. Ours has no sitecustomize
that this one could hide. CORE_MODULES: names of modules, separated by spaces; CORE_PACKAGES: those of distributions.
"""

import importlib.machinery
import importlib.metadata
import os
import re
import sys

_MODULES = frozenset(os.environ["CORE_MODULES"].split())
_PACKAGES = frozenset(os.environ["CORE_PACKAGES"].split())


class OnlyCore(importlib.machinery.PathFinder):
    """Python's own finder, for which other packages are not there."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """None for a package of the developers'."""
        spec = super().find_spec(fullname, path, target)
        is_installed = spec is not None and "site-packages" in str(spec.origin or spec.submodule_search_locations)
        return None if is_installed and fullname.partition(".")[0] not in _MODULES else spec

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        """Only the core's."""
        for distribution in super().find_distributions(*args, **kwargs):
            if re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower() in _PACKAGES:
                yield distribution


sys.meta_path[:] = [OnlyCore if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
