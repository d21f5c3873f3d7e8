"""Finding and loading plugins: packages that add to Quire through entry points.

`QUIRE_PLUGINS` names those that may load. Each is loaded at most once in a process; one that fails is named in the log, left out,
and stops nothing else. What happened to each is remembered, for `quire plugins`.
Knows entry points. Knows nothing of what a plugin adds.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from quire import envs
from quire.errors import did_you_mean
from quire.logger import init_logger
from quire.plugins.registry import owned_by

logger = init_logger(__name__)

PLATFORM_GROUP = "quire.platform_plugins"
GENERAL_GROUP = "quire.general_plugins"
STAT_LOGGERS_GROUP = "quire.stat_loggers"
LOGITS_PROCESSORS_GROUP = "quire.logits_processors"
ENDPOINTS_GROUP = "quire.endpoints"
IO_PROCESSORS_GROUP = "quire.io_processors"
PATCHES_GROUP = "quire.patches"
GROUPS = (
    PLATFORM_GROUP,
    GENERAL_GROUP,
    STAT_LOGGERS_GROUP,
    LOGITS_PROCESSORS_GROUP,
    ENDPOINTS_GROUP,
    IO_PROCESSORS_GROUP,
    PATCHES_GROUP,
)
BUILT_IN = ("lora_filesystem_resolver", "lora_hf_hub_resolver")
"""Plugins of vLLM's that are part of Quire: `QUIRE_PLUGINS` may name them, and need not."""
ONLY_IF_NAMED = (ENDPOINTS_GROUP,)
"""Groups whose plugins load only if `QUIRE_PLUGINS` names them: an installed package does not open routes by itself."""

State = Literal["found", "loaded", "refused", "failed"]


@dataclasses.dataclass
class Plugin:
    """An entry point of one of the groups.

    Attributes:
        package: the installed distribution that it belongs to, with its version.
        state: `found` (not asked for yet), `loaded`, `refused` (it may not load) or `failed`; `why` says the reason.
    """

    group: str
    point: EntryPoint
    package: str
    state: State = "found"
    why: str = ""

    @property
    def name(self) -> str:
        """What `QUIRE_PLUGINS` calls it."""
        return self.point.name

    @property
    def owner(self) -> str:
        """What messages call it."""
        return f"{self.name} ({self.package})" if self.package else self.name

    def fail(self, error: Exception) -> None:
        """Remember what it raised."""
        self.state, self.why = "failed", f"{type(error).__name__}: {error}"

    def as_plain(self) -> dict[str, str]:
        """Its fields, for JSON."""
        return {
            "group": self.group,
            "name": self.name,
            "target": self.point.value,
            "package": self.package,
            "state": self.state,
            "why": self.why,
        }


_plugins: dict[tuple[str, str, str], Plugin] = {}
_called: dict[str, set[str]] = {}
_lock = threading.RLock()  # a core's thread and a frontend's may load at the same time


@functools.cache
def _all_points() -> tuple[EntryPoint, ...]:
    """Of all groups at once: to look into every installed package takes long."""
    installed = entry_points()
    return tuple(point for group in GROUPS for point in installed.select(group=group))


def _points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(point for point in _all_points() if point.group == group)


def discover(group: str) -> list[Plugin]:
    """The plugins of a group, by name, each with what has become of it in this process."""
    plugins = [_known(group, point) for point in _points(group)]
    plugins = list({id(plugin): plugin for plugin in plugins}.values())  # one that two folders of sys.path offer
    for plugin in plugins:
        if plugin.state in ("found", "refused"):
            plugin.why = _refusal(plugin, plugins)
            plugin.state = "refused" if plugin.why else "found"
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.package))


def _known(group: str, point: EntryPoint) -> Plugin:
    dist = point.dist
    package = f"{dist.name} {dist.version}" if dist is not None else ""
    return _plugins.setdefault((group, point.name, package), Plugin(group, point, package))


def _refusal(plugin: Plugin, all_of_group: list[Plugin]) -> str:
    """Why a plugin may not load; empty: it may."""
    allowed = envs.QUIRE_PLUGINS
    if allowed is None and plugin.group in ONLY_IF_NAMED:
        return "plugins of this group load only if QUIRE_PLUGINS names them"
    if allowed is not None and plugin.name not in allowed:
        return f"QUIRE_PLUGINS={','.join(allowed)} does not name it"
    twins = sorted(other.package or "?" for other in all_of_group if other.name == plugin.name)
    if len(twins) > 1:
        return f"the packages {' and '.join(twins)} have a plugin of this name each: uninstall one of them"
    return ""


def find_plugins(group: str) -> dict[str, Plugin]:
    """The plugins of a group that may load, by name. Two of one name are both refused, with an error in the log."""
    plugins = discover(group)
    for plugin in plugins:
        if plugin.state == "refused" and plugin.why.startswith("the packages"):
            logger.error("Plugin %r of %s is left out: %s", plugin.name, group, plugin.why)
    return {plugin.name: plugin for plugin in plugins if not _refusal(plugin, plugins)}


def load(plugin: Plugin) -> Any:
    """What a plugin's entry point names.

    Raises:
        Exception: whatever the plugin raises. That is remembered.
    """
    try:
        with owned_by(plugin.owner):
            target = plugin.point.load()
    except Exception as error:
        plugin.fail(error)
        raise
    plugin.state = "loaded"
    return target


def load_plugins(group: str) -> dict[str, Any]:
    """What the entry point of each plugin of a group names. One that fails is named in the log and left out."""
    return read_plugins(group, lambda _, target: target)


def read_plugins(group: str, read: Callable[[Plugin, Any], Any]) -> dict[str, Any]:
    """The same, after `read` made something of it."""
    loaded: dict[str, Any] = {}
    for name, plugin in find_plugins(group).items():
        try:
            loaded[name] = read(plugin, load(plugin))
        except Exception as error:
            plugin.fail(error)
            logger.exception("Plugin %r (%s) of %s cannot be loaded and is left out", name, plugin.point.value, group)
    return loaded


def load_general_plugins(process_kind: str) -> tuple[str, ...]:
    """Call the general plugins for a kind of process; returns the names of those that have worked.

    A function with an argument is told the kind, and is called once for each kind that this process is of (a process that runs
    an engine alone is `frontend`, `core` and `worker`). A function without one is called once. One that has failed is not
    called again.

    Args:
        process_kind: `frontend`, `core`, `worker` or `inspector` (a command that only looks, as `quire models`).
    """
    with _lock:
        _warn_of_unknown_names()
        plugins = [plugin for plugin in find_plugins(GENERAL_GROUP).values() if plugin.state != "failed"]
        new = [plugin.name for plugin in plugins if plugin.owner not in _called]
        done = tuple(plugin.name for plugin in plugins if _call(plugin, process_kind))
    if new := [name for name in new if name in done]:
        logger.info("General plugins loaded: %s", ", ".join(new))
    return done


def _call(plugin: Plugin, process_kind: str) -> bool:
    """Call a plugin's function if it is to be called for this kind; whether it works."""
    called = _called.setdefault(plugin.owner, set())
    try:
        function: Callable[..., Any] = load(plugin)
        takes_kind = bool(inspect.signature(function).parameters)
        if process_kind not in called and (takes_kind or not called):
            called.add(process_kind)
            with owned_by(plugin.owner):
                function(process_kind) if takes_kind else function()
    except Exception as error:
        plugin.fail(error)
        logger.exception("Plugin %r (%s) failed and is left out", plugin.name, plugin.point.value)
        return False
    return True


def _warn_of_unknown_names() -> None:
    """Names in `QUIRE_PLUGINS` that no installed plugin has: perhaps a typing error."""
    allowed = envs.QUIRE_PLUGINS
    if not allowed:
        return
    known = [*BUILT_IN, *(point.name for group in GROUPS for point in _points(group))]
    for name in allowed:
        if name not in known:
            hint = did_you_mean(name, known)
            logger.warning_once("QUIRE_PLUGINS names %r, and no plugin that is installed is called so%s", name, hint)


def forget() -> None:
    """Know nothing of what was found and loaded; for tests."""
    _plugins.clear()
    _called.clear()
    _all_points.cache_clear()
