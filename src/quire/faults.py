"""Faults that are asked for: a process kills or stops itself at a named point, so that it can be tested what others do then.

`QUIRE_FAULTS` names them, several with commas: `WHEN-POINT[@PROCESS]:ACTION[:PASS[:FILE]]`, for example
`before-execute:kill:17`, `after-send@core:kill:1:/tmp/now` or `before-step@rank 1:stop:5`. It is read once, when a process
starts; without it nothing is changed. A point is a function: a fault puts another one around it.
"""

import functools
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from quire import envs
from quire.errors import ConfigError

POINTS: dict[str, tuple[str, ...]] = {
    "load": ("quire.worker.worker:Worker.load_model",),
    "start": ("quire.engine.core:EngineCore.__init__",),
    "schedule": ("quire.core.scheduler:Scheduler.schedule",),
    "execute": (
        "quire.executor.uniproc:UniprocExecutor.execute",
        "quire.executor.multiproc:MultiprocExecutor.execute",
    ),
    "collect": (
        "quire.executor.uniproc:UniprocExecutor.collect",
        "quire.executor.multiproc:MultiprocExecutor.collect",
    ),
    "update": ("quire.core.scheduler:Scheduler.update",),
    "send": ("quire.engine.core_loop:CoreLoop.tell",),
    "utility": ("quire.engine.core:EngineCore.call_utility",),
    "grammar": ("quire.structured_output.grammars:Grammars._build",),
    "weights": ("quire.worker.worker:Worker.read_folder",),
    "step": ("quire.worker.worker:Worker.execute",),
}
"""The functions behind each point, as `module:Class.method`. Every rank passes `load`, `weights` and `step` (without ranks the
core does), and the core the others."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault(NamedTuple):
    """One fault.

    Attributes:
        point: a name in `POINTS`.
        is_before: it happens before the function is called, not after it has returned.
        process: `core` or `rank N`; empty for every process.
        action: `kill` or `stop`.
        first_pass: the pass at which it happens; with a `file`, the first one at which it may.
        file: it happens at the first pass that finds this file, and removes it: whoever makes the file says when, and that it
            happens once. Empty for a fault that happens in every process that comes so far.
    """

    point: str
    is_before: bool
    process: str
    action: str
    first_pass: int = 1
    file: str = ""


def parse(text: str) -> list[Fault]:
    """Faults from the text of `QUIRE_FAULTS`. Raises ConfigError: it names something that does not exist."""
    return [_parse_one(part) for part in text.split(",") if part]


def _parse_one(text: str) -> Fault:
    place, _, rest = text.partition(":")
    action, _, rest = rest.partition(":")
    first_pass, _, file = rest.partition(":")
    where, _, process = place.partition("@")
    when, _, point = where.partition("-")
    if when not in ("before", "after") or point not in POINTS:
        names = ", ".join(POINTS)
        raise _error(text, f"a place is before-POINT or after-POINT, with one of these points: {names}")
    if action not in _SIGNALS:
        raise _error(text, f"the action is one of {', '.join(_SIGNALS)}")
    if first_pass and (not first_pass.isascii() or not first_pass.isdigit() or int(first_pass) < 1):
        raise _error(text, "the pass is a whole number above 0")
    return Fault(point, when == "before", process, action, int(first_pass or 1), file)


def _error(text: str, allowed: str) -> ConfigError:
    return ConfigError(f"QUIRE_FAULTS: {text!r} is not valid: {allowed}", setting="QUIRE_FAULTS")


def begin_process(process: str) -> None:
    """Install the faults that are asked for in this process. Raises ConfigError: `QUIRE_FAULTS` is not valid."""
    if envs.QUIRE_FAULTS is None:
        return
    for fault in parse(envs.QUIRE_FAULTS):
        if fault.process in ("", process):
            install(fault.point, fault.is_before, _Trigger(fault))


class _Trigger:
    """Counts the passes of one fault's point."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._num_passes = 0

    def __call__(self) -> None:
        fault = self._fault
        self._num_passes += 1
        if fault.file:
            if self._num_passes < fault.first_pass or not _take(fault.file):
                return
        elif self._num_passes != fault.first_pass:
            return
        os.kill(os.getpid(), _SIGNALS[fault.action])


def _take(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def install(point: str, is_before: bool, callback: Callable[[], None]) -> None:
    """Have `callback` called at each pass of a point in this process."""
    for path in POINTS[point]:
        owner, name = find(path)
        setattr(owner, name, _around(getattr(owner, name), is_before, callback))


def find(path: str) -> tuple[Any, str]:
    """The class that a path in `POINTS` names, and its method's name."""
    module, _, name = path.partition(":")
    class_name, _, method_name = name.partition(".")
    return getattr(importlib.import_module(module), class_name), method_name


def _around(function: Callable[..., Any], is_before: bool, callback: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def passed(*args: Any, **kwargs: Any) -> Any:
        if is_before:
            callback()
        value = function(*args, **kwargs)
        if not is_before:
            callback()
        return value

    return passed
