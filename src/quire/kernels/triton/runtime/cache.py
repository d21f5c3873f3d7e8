"""Triton's cache of compiled kernels in Quire's folders: one that was shipped (read only), then one that is written to.

Files name one another relative to their folder, so that a folder may be copied to another machine. Knows files and Triton's
cache interface; knows no kernel.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime import cache as triton_cache
from triton.runtime.jit import DependenciesFinder

from quire import envs
from quire.kept_files import write_whole
from quire.kernels.triton.runtime import places

_GROUP = "__grp__"
NEEDED = (".cubin", ".json")
"""What running a kernel takes; Triton's intermediate forms are not kept."""


class KernelCache(triton_cache.CacheManager):
    """Triton's files for one kernel (`key`), in the first folder that has them.

    A group is a list of names in its own folder, not of paths.
    """

    folders: list[Path] = []
    """All that are asked, set by `install`; the last is written to."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:  # for those who develop kernels
            self._places = [Path(knobs.cache.override_dir if override else knobs.cache.dump_dir) / key]
        else:
            self._places = [folder / key for folder in self.folders]

    def get_file(self, filename: str) -> str | None:
        """The path of a file, or None."""
        for place in self._places:
            path = place / filename
            if path.exists():
                return str(path)
        return None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a group's files, or None where there is no such group or it is not whole."""
        for place in self._places:
            try:
                names = json.loads((place / f"{_GROUP}{filename}").read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(names, list) and all((place / str(name)).exists() for name in names):
                return {str(name): str(place / str(name)) for name in names}
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file whole or not at all; its path."""
        path = self._places[-1] / filename
        write_whole(path, data if isinstance(data, bytes) else str(data).encode())
        return str(path)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Name the files that belong together: those that running a kernel takes."""
        return self.put(json.dumps([name for name in group if name.endswith(NEEDED)]), f"{_GROUP}{filename}")


def _note_first(note: Callable[..., None]) -> Callable[..., None]:
    """Triton before 3.8 adds the globals of a function that a kernel calls to the kernel's key before it has looked for them, so
    the key depends on what was compiled earlier: two processes would have two keys for one kernel. Here it looks first."""

    @functools.wraps(note)
    def note_dependency(finder: Any, func: Any) -> None:
        _ = func.cache_key
        note(finder, func)

    return note_dependency


_NOTE = getattr(DependenciesFinder, "_update_hash", None)


def install(folder: Path | None = None) -> None:
    """Have Triton keep its kernels here; a user's TRITON_CACHE_DIR or TRITON_CACHE_MANAGER wins. May be called again.

    Args:
        folder: the only one that is asked and written to, instead of the usual ones and the user's.
    """
    if _NOTE is not None:
        DependenciesFinder._update_hash = _note_first(_NOTE)
    is_users = knobs.cache.manager_class not in (None, KernelCache) or envs.is_set("TRITON_CACHE_DIR")
    if is_users and folder is None:
        return
    KernelCache.folders = [folder] if folder else [*places.shipped_folders(), places.writable_folder()]
    knobs.cache.manager_class = KernelCache
    knobs.compilation.store_binary_only = True
    triton_cache.triton_key = places.toolchain
