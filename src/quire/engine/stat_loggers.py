"""Stat loggers from plugins: objects that a frontend tells about steps, tokens and finished requests.

One that fails is named in the log and told nothing more; no request fails with it. Knows plugins and hooks; knows no figures.
"""

import functools
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.engine.output_processor import StatsHook
from quire.logger import init_logger
from quire.plugins import STAT_LOGGERS_GROUP, load_plugins

logger = init_logger(__name__)


class StatLogger(StatsHook):
    """Base of a plugin's stat logger: override what it wants to hear. One instance belongs to one frontend, which calls it
    between its other work: it must not wait for anything. Times in seconds."""

    def __init__(self, config: EngineConfig) -> None:
        """Made when a frontend starts."""


class _Guarded(StatsHook):
    """Tells a hook until it fails."""

    def __init__(self, name: str, hook: StatsHook) -> None:
        self._name = name
        self._hook: StatsHook | None = hook
        for method in vars(StatsHook):
            if method.startswith("record_"):
                setattr(self, method, functools.partial(self._tell, method))

    def _tell(self, method: str, *args: Any) -> None:
        if self._hook is None:
            return
        try:
            getattr(self._hook, method)(*args)
        except Exception:  # a plugin's code: whatever it raises harms nobody else
            self._hook = None
            logger.exception("The stat logger %r failed in %s and is told nothing more", self._name, method)


def load_stat_loggers(config: EngineConfig) -> list[StatsHook]:
    """The plugins' stat loggers: each entry point names a class, or a function, that makes one from the configuration."""
    hooks: list[StatsHook] = []
    makers: dict[str, Callable[[EngineConfig], StatsHook]] = load_plugins(STAT_LOGGERS_GROUP)
    for name, make in makers.items():
        try:
            hooks.append(_Guarded(name, make(config)))
        except Exception:
            logger.exception("The stat logger %r cannot be made and is left out", name)
    return hooks
