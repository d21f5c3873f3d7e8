"""Plugins: packages that add to Quire through entry points. Found by name, filtered by `QUIRE_PLUGINS`, loaded once.

Knows entry points. Knows nothing of what a plugin adds.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quire import envs
from quire.logger import init_logger

logger = init_logger(__name__)

PLATFORM_GROUP = "quire.platform_plugins"
GENERAL_GROUP = "quire.general_plugins"
STAT_LOGGERS_GROUP = "quire.stat_loggers"
LOGITS_PROCESSORS_GROUP = "quire.logits_processors"
ENDPOINTS_GROUP = "quire.endpoints"


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """The plugins of a group that may load, by name; `QUIRE_PLUGINS` is an allow-list."""
    allowed = envs.QUIRE_PLUGINS
    return {point.name: point for point in entry_points(group=group) if allowed is None or point.name in allowed}


def load_plugins(group: str) -> dict[str, Any]:
    """What each plugin's entry point names. One that fails is named in the log and left out."""
    loaded: dict[str, Any] = {}
    for name, point in find_plugins(group).items():
        try:
            loaded[name] = point.load()
        except Exception:
            logger.exception("Plugin %r (%s) of %s cannot be loaded and is left out", name, point.value, group)
    return loaded


@functools.cache
def load_general_plugins(process_kind: str) -> tuple[str, ...]:
    """Call every general plugin once in this process; returns the names of those that worked.

    Args:
        process_kind: `frontend`, `core`, `worker` or `inspector`; handed to a plugin whose function takes an argument.
    """
    done: list[str] = []
    for name, function in load_plugins(GENERAL_GROUP).items():
        try:
            _call(function, process_kind)
        except Exception:
            logger.exception("Plugin %r failed and is left out", name)
        else:
            done.append(name)
    if done:
        logger.info("General plugins loaded: %s", ", ".join(done))
    return tuple(done)


def _call(function: Callable[..., Any], process_kind: str) -> None:
    if inspect.signature(function).parameters:
        function(process_kind)
    else:
        function()
