"""Patches: declared changes of Quire from outside, for the day when a door is missing. See docs/patches.md.

An installed package declares them in the entry-point group `quire.patches`. Where there are none, only this file and the
declaration are loaded.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.patch.declaration import Patch, PatchKind, ProcessKind, Target

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.patch.plan import Found, Status
    from quire.patch.process import ProcessPatches
    from quire.plugins import Plugin

__all__ = [
    "Patch",
    "PatchKind",
    "ProcessKind",
    "Target",
    "bootstrap",
    "check_same",
    "describe",
    "found",
    "installed",
    "marks",
    "settle",
]


def bootstrap(kind: ProcessKind, *, only_first: bool = False) -> None:
    """The first line of every process entry: have this process's patches applied as their targets are imported.

    Args:
        kind: of process. A process that runs an engine alone is `frontend`, `core` and `worker`, and calls this for each.
        only_first: nothing is done if this was called before, for any kind.

    Raises:
        ConfigError: something is wrong with a patch, and `QUIRE_STRICT_PATCHES` is set.
    """
    patches = _patches()
    if patches is not None and not (only_first and patches.kinds):
        patches.begin(kind)


def settle(config: "EngineConfig") -> None:
    """The configuration of an engine of this process is known: decide about patches that depend on it, and log what there is."""
    patches = _patches()
    if patches is not None:
        patches.settle(config)


def marks() -> list[str]:
    """What this process has decided about patches; equal in all processes of an engine. Empty: there are none."""
    patches = _patches()
    return [] if patches is None else patches.marks()


def check_same(others: Sequence[str], who: str) -> None:
    """Compare this process's patches with those of the process that started it.

    Raises:
        ConfigError: they differ.
    """
    own = marks()
    if list(others) != own:
        from quire.errors import ConfigError

        raise ConfigError.of(
            "patches",
            f"{who} has {', '.join(others) or 'none'}, and this process has {', '.join(own) or 'none'}: install the same "
            "packages for all processes of an engine, and give them the same QUIRE_PLUGINS and QUIRE_VERSION",
        )


def describe() -> dict[str, Any]:
    """What this process has of patches, as plain values; empty where none is declared."""
    patches = _patches()
    if patches is None:
        return {}
    from quire.patch.process import digest_of

    return {"digest": digest_of(patches.marks()), "patches": patches.describe()}


def installed() -> "list[Status]":
    """Every installed patch with what is decided about it before anything is imported; applies nothing."""
    from quire import envs
    from quire.patch.plan import decide
    from quire.patch.process import version

    return decide(found(), version(), envs.QUIRE_PATCH_DATE)


@functools.cache
def _patches() -> "ProcessPatches | None":
    """Those of this process; None where none is declared."""
    patches = found()
    if not patches:
        return None
    from quire import envs
    from quire.patch.process import ProcessPatches

    return ProcessPatches(patches, strict=envs.QUIRE_STRICT_PATCHES)


def found() -> "list[Found]":
    """Every installed patch that may load, with the package that brings it."""
    from quire.plugins.discovery import PATCHES_GROUP, read_plugins

    return [each for patches in read_plugins(PATCHES_GROUP, _read).values() for each in patches]


def _read(plugin: "Plugin", value: Any) -> "list[Found]":
    """The patches that an entry point names: one, several, or a function that returns such.

    Raises:
        TypeError: it is something else.
    """
    from quire.patch.plan import Found

    value = value() if callable(value) else value
    patches = [value] if isinstance(value, Patch) else list(value)
    for patch in patches:
        if not isinstance(patch, Patch):
            raise TypeError(f"{patch!r} is not a quire.patch.Patch")
    return [Found(patch, plugin.package) for patch in patches]
