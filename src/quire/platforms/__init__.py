"""Which platform this process runs on: plugins are asked first, then the built-in ones. Loads only the one that is chosen."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from quire import envs
from quire.errors import ConfigError, did_you_mean, refusing
from quire.logger import init_logger

if TYPE_CHECKING:
    from quire.platforms.interface import Platform

logger = init_logger(__name__)

BUILT_IN = {"cuda": "quire.platforms.cuda:CudaPlatform", "cpu": "quire.platforms.cpu:CpuPlatform"}
"""Platforms of this package, best first: name to class path."""

UNTESTED = {
    "rocm": "quire.platforms.rocm:RocmPlatform",
    "xpu": "quire.platforms.xpu:XpuPlatform",
    "mps": "quire.platforms.mps:MpsPlatform",
}
"""Those that have never run on their hardware: used if they are named, and never chosen."""


def current_platform(device: str = "auto") -> Platform:
    """The platform for a `device` setting: `auto`, a built-in name, or a platform plugin's name.

    Raises:
        ConfigError: unknown name, two plugins that both claim this machine, or a chosen plugin that does not work.
    """
    wanted = device if device != "auto" else envs.QUIRE_PLATFORM or "auto"
    setting = "device" if device != "auto" else "QUIRE_PLATFORM"
    return _platform_at(_class_path_for(wanted, setting))


@functools.cache
def _platform_at(class_path: str) -> Platform:
    module, _, name = class_path.partition(":")
    if not name:
        module, _, name = class_path.rpartition(".")
    with refusing(ImportError, AttributeError, setting="device", what=f"platform {class_path!r} cannot be loaded"):
        return getattr(importlib.import_module(module), name)()


def _class_path_for(wanted: str, setting: str) -> str:
    from quire.plugins import PLATFORM_GROUP, find_plugins

    plugins = find_plugins(PLATFORM_GROUP)
    if wanted in plugins:
        path = _ask(wanted, must_work=True)
        if path is None:
            raise ConfigError(f"{setting}={wanted!r}: that platform plugin says it cannot run here", setting=setting)
        return path
    if wanted in BUILT_IN or wanted in UNTESTED:
        return {**BUILT_IN, **UNTESTED}[wanted]
    answers = {name: path for name, path in ask_all().items() if path is not None}
    if wanted != "auto":
        for path in answers.values():
            if _platform_at(path).name == wanted:
                return path
        raise _unknown(wanted, setting, [*BUILT_IN, *UNTESTED, *plugins])
    if len(answers) > 1:
        raise ConfigError(
            f"the platform plugins {' and '.join(sorted(answers))} both claim this machine: choose one with QUIRE_PLATFORM "
            f"(or --device), or limit QUIRE_PLUGINS",
            setting="QUIRE_PLATFORM",
        )
    return next(iter(answers.values()), None) or _best_built_in()


def _best_built_in() -> str:
    """CUDA where it can run, else the CPU."""
    from quire.platforms import cuda

    why = cuda.why_unusable()
    if why is not None:
        logger.debug("not on the cuda platform: %s", why)
    return BUILT_IN["cpu" if why is not None else "cuda"]


def ask_all() -> dict[str, str | None]:
    """What each platform plugin answers, by name; of one that fails, None."""
    from quire.plugins import PLATFORM_GROUP, find_plugins

    return {name: _ask(name) for name in find_plugins(PLATFORM_GROUP)}


def _ask(name: str, *, must_work: bool = False) -> str | None:
    """A plugin's answer: the platform's class path, or None if it cannot run here."""
    from quire.plugins import PLATFORM_GROUP, find_plugins, load

    plugin = find_plugins(PLATFORM_GROUP)[name]
    try:
        return load(plugin)()
    except Exception as error:
        plugin.fail(error)
        if must_work:
            raise ConfigError(f"the platform plugin {name!r} failed: {error}", setting="device") from error
        logger.exception("Platform plugin %r failed and is left out", name)
        return None


def _unknown(wanted: str, setting: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{setting}={wanted!r} is not a platform{did_you_mean(wanted, known)}; allowed: auto, {', '.join(known)}",
        setting=setting,
    )
