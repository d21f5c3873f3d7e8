"""Where patches come from: entry points of the group `quire.patches`."""

from collections.abc import Iterable
from typing import Any

from quire.logger import init_logger
from quire.patch.declaration import Patch
from quire.patch.plan import Found
from quire.plugins import Plugin, load

logger = init_logger(__name__)


def read_patches(plugins: Iterable[Plugin]) -> list[Found]:
    """The patches that packages declare. A package that fails is named in the log and left out."""
    found: list[Found] = []
    for plugin in plugins:
        try:
            found += [Found(patch, plugin.package) for patch in as_patches(load(plugin))]
        except Exception as error:
            plugin.fail(error)
            value = plugin.point.value
            logger.exception("The patches of %r (%s) cannot be loaded and are left out", plugin.name, value)
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
