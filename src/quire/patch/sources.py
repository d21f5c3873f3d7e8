"""Where patches come from: entry points of the group `quire.patches`."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from quire.logger import init_logger
from quire.patch.declaration import Patch
from quire.patch.plan import Found

logger = init_logger(__name__)


def read_patches(points: Iterable[EntryPoint]) -> list[Found]:
    """The patches behind entry points. A package that fails is named in the log and left out."""
    found: list[Found] = []
    for point in points:
        dist = point.dist
        package = f"{dist.name} {dist.version}" if dist is not None else ""
        try:
            found += [Found(patch, package) for patch in as_patches(point.load())]
        except Exception:
            logger.exception("The patches of %r (%s) cannot be loaded and are left out", point.name, point.value)
    return found


def as_patches(value: Any) -> list[Patch]:
    """What an entry point may name: a patch, several, or a function that returns such.

    Raises:
        TypeError: it is something else.
    """
    value = value() if callable(value) else value
    patches = [value] if isinstance(value, Patch) else list(value)
    for patch in patches:
        if not isinstance(patch, Patch):
            raise TypeError(f"{patch!r} is not a quire.patch.Patch")
    return patches
