"""Life-cycle hooks of an engine core: what a plugin or a platform does at its turning points, without a core of its own.

The core calls them in its own thread, wherever it runs: in the user's process, in a thread of a server, in a process of its
own. A hook is part of the step loop, so it must not block. A plugin registers a class in `HOOKS`, in its function for the
process kind `core`; a platform names class paths (`Platform.core_hooks`). Knows when; knows nothing of what hooks do.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.platforms.interface import Platform
from quire.plugins.registry import Registry, import_class
from quire.request import SchedulerStats


class Core(Protocol):
    """What a hook sees of the engine core."""

    config: EngineConfig
    kv_cache: KVCacheConfig

    def stats(self) -> SchedulerStats:
        """Figures of now; counters since the start."""
        ...

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method on every worker. Not while steps are in flight, unless the caller can wait for them."""
        ...


class CoreHooks:
    """Does nothing at any point; the base of others. One instance serves one core.

    A step may be planned before an earlier one's result has come: `before_schedule` and `after_step` need not alternate.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def ready(self, core: Core) -> None:
        """The executor is ready: the model is loaded and its pages are allocated. No request has come."""

    def before_schedule(self) -> None:
        """A step is about to be planned."""

    def planned(self, step: SchedulerOutput) -> None:
        """A step was planned, and goes to the workers next: this is the time to add to `step.extras`."""

    def after_step(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """A step's result has come, and the scheduler has taken it in. `output.step_ms` is the device's time."""

    def idle(self) -> bool:
        """There is nothing to do; a little may be done for later. True where another call could do more."""
        return False

    def shutdown(self) -> None:
        """The core ends; called once, before the executor ends."""


HOOKS: Registry[type[CoreHooks]] = Registry("core hook", "QUIRE_PLUGINS")


def make_hooks(config: EngineConfig, platform: Platform, own: Sequence[CoreHooks] = ()) -> list[CoreHooks]:
    """The hooks of one core: the engine's own, registered ones, then the platform's.

    Raises:
        ConfigError: something cannot be imported, or is no subclass of `CoreHooks`.
    """
    hooks = [HOOKS.find_class(name, CoreHooks) for name in HOOKS]
    hooks += [import_class(path, "device", CoreHooks, "a core hook") for path in platform.core_hooks()]
    return [*own, *(hook(config) for hook in hooks)]
