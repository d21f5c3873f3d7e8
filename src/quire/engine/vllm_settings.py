"""vLLM's settings, and what happens to those that Quire does not have.

`vllm_settings.json` is the one list of vLLM's settings with their defaults. `EngineArgs`, the command line and the table of
docs/migrating-from-vllm.md read it. A setting that Quire does not have is accepted at vLLM's default, so that existing scripts
run. Another value is refused, never silently ignored. A setting that has no meaning in Quire is accepted with every value, and
the log says so.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, TypeVar

from quire.config.checks import accept_aliases, aliases_of, check_keys
from quire.engine.settings import as_plain
from quire.errors import ConfigError, check_all, did_you_mean
from quire.guards import is_dict
from quire.logger import init_logger

logger = init_logger(__name__)
T = TypeVar("T")

LIST: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_settings.json").read_text("utf-8"))
ENGINE_DEFAULTS: dict[str, Any] = {name: value for group in LIST["engine"].values() for name, value in group.items()}
SERVER_DEFAULTS: dict[str, Any] = {name: value for group in LIST["server"].values() for name, value in group.items()}
DEFAULTS = ENGINE_DEFAULTS | SERVER_DEFAULTS
"""Setting to vLLM's default."""
NO_EFFECT: dict[str, str] = {name: reason for reason, names in LIST["no_effect"].items() for name in names}
"""Settings that are accepted with every value, and why they change nothing."""


def flags_of(*names: str) -> list[str]:
    """The flags of a setting, given by its name and its aliases; short ones last."""
    return [f"--{name.replace('_', '-')}" for name in names] + LIST["short"].get(names[0], [])


def accepted_values(name: str) -> list[Any]:
    """The values with which a setting is accepted that Quire does not have: vLLM's default, and others that ask for nothing."""
    default = DEFAULTS[name]
    if default is False:
        same: list[Any] = [None, False]
    elif default in (None, {}, [], ""):
        same = [None, {}, [], ""]
    else:
        same = [default]
    return same + LIST["also_accepted"].get(name, [])


def accept_or_refuse(name: str, value: Any) -> None:
    """Accept a setting that Quire does not have, or that has no effect. Raises ConfigError if it asks for something."""
    value = as_plain(value)
    if name in NO_EFFECT:
        if name == "compilation_config" and records_nothing(value):
            raise ConfigError(f"{name}={value!r} records no steps: use enforce_eager", setting="enforce_eager")
        if name == "kernel_config" and is_dict(value):
            check_keys(name, value, LIST["keys_without_effect"][name])
        logger.info("%s has no effect: %s", name, NO_EFFECT[name])
        return
    accepted = accepted_values(name)
    if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in accepted):
        instead = LIST["instead"].get(name) or f"leave it out (accepted: {', '.join(map(repr, accepted))})"
        raise ConfigError(f"{name}={value!r} is not available yet in Quire; {instead}", setting=name)


def records_nothing(value: Any) -> bool:
    """Whether a `compilation_config` turns compilation and CUDA graphs off."""
    if not is_dict(value):
        return _is_zero(value)
    mode = value.get("mode", value.get("level"))
    return _is_zero(mode) or "NONE" in (mode, value.get("cudagraph_mode"))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 0


def refuse_unknown(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass of settings: its constructor also takes aliases and vLLM's settings; it refuses other
    names."""
    accept_aliases(cls)
    generated: Any = cls.__init__
    known = {*aliases_of(cls), *(field.name for field in dataclasses.fields(cls))}  # type: ignore[arg-type]

    def take(name: str, value: Any) -> None:
        if name not in ENGINE_DEFAULTS:
            hint = did_you_mean(name, [*known, *ENGINE_DEFAULTS], "; {}")
            raise ConfigError(f"{name!r} is not an engine setting{hint}", setting=name)
        accept_or_refuse(name, value)

    @functools.wraps(generated)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        foreign = {name: kwargs.pop(name) for name in [*kwargs] if name not in known}
        check_all(functools.partial(take, name, value) for name, value in foreign.items())
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls
