"""The control verbs of both engines: what an engine may be told besides requests (to pause, to sleep, to forget, to measure).

A verb is declared once, with its parameters and its docstring: as a method of `EngineCore` that is marked as a utility. Here it
becomes a method of the synchronous engine, which waits, and of the asynchronous one, which is awaited.
"""

import abc
import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from quire.engine.core import EngineCore
from quire.engine.pausing import PauseState

P = ParamSpec("P")
R = TypeVar("R")

NOTED = frozenset(
    {"pause", "resume", "sleep", "wake_up", "start_weight_update", "finish_weight_update", "reload_weights"}
)
"""Verbs of the core that are events of their own (`EventKind.CONTROL`)."""

_DRAIN_CHECK_S = 0.01
"""Between two looks at whether the requests of all frontends have ended."""


def _blocking(method: Callable[Concatenate[EngineCore, P], R]) -> Callable[Concatenate["EngineControl", P], R]:
    """A method that calls the core's method of the same name and parameters."""

    @functools.wraps(method)
    def verb(self: "EngineControl", *args: P.args, **kwargs: P.kwargs) -> R:
        return self.call(method.__name__, *args, **kwargs)

    return verb


def _awaitable(
    method: Callable[Concatenate[EngineCore, P], R],
) -> Callable[Concatenate["AsyncControl", P], Coroutine[Any, Any, R]]:
    """As `_blocking`, to be awaited."""

    @functools.wraps(method)
    async def verb(self: "AsyncControl", *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.call(method.__name__, *args, **kwargs)

    return verb


def _forget_media(frontend: Any) -> None:
    media = frontend.input_processor.media
    if media is not None:
        media.cache.clear()


class EngineControl(abc.ABC):
    """The verbs of the synchronous engine."""

    @abc.abstractmethod
    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value."""

    reset_prefix_cache = _blocking(EngineCore.reset_prefix_cache)
    release_kv_cache_memory = _blocking(EngineCore.release_kv_cache_memory)
    wake_up = _blocking(EngineCore.wake_up)
    is_sleeping = _blocking(EngineCore.is_sleeping)
    is_standing_still = _blocking(EngineCore.is_standing_still)
    start_profile = _blocking(EngineCore.start_profile)
    stop_profile = _blocking(EngineCore.stop_profile)
    collective_rpc = _blocking(EngineCore.collective_rpc)
    explain = _blocking(EngineCore.explain)
    init_weight_transfer_engine = _blocking(EngineCore.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _blocking(EngineCore.shutdown_weight_transfer_engine)
    start_weight_update = _blocking(EngineCore.start_weight_update)
    update_weights = _blocking(EngineCore.update_weights)
    finish_weight_update = _blocking(EngineCore.finish_weight_update)
    reload_weights = _blocking(EngineCore.reload_weights)
    update_weight_version = _blocking(EngineCore.update_weight_version)
    get_weight_version = _blocking(EngineCore.get_weight_version)
    weight_info = _blocking(EngineCore.weight_info)
    remove_lora = _blocking(EngineCore.remove_lora)
    pin_lora = _blocking(EngineCore.pin_lora)

    def list_loras(self) -> set[int]:
        """The numbers (`lora_int_id`) of adapters on the device or in host memory."""
        return set(self.call("list_loras"))

    reset_encoder_cache = _blocking(EngineCore.reset_encoder_cache)

    def reset_mm_cache(self) -> None:
        """Forget media that this frontend has processed."""
        _forget_media(getattr(self, "llm_engine", self))


class AsyncControl(abc.ABC):
    """The verbs of the asynchronous engine."""

    @abc.abstractmethod
    async def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value."""

    reset_prefix_cache = _awaitable(EngineCore.reset_prefix_cache)
    release_kv_cache_memory = _awaitable(EngineCore.release_kv_cache_memory)
    wake_up = _awaitable(EngineCore.wake_up)
    is_sleeping = _awaitable(EngineCore.is_sleeping)
    start_profile = _awaitable(EngineCore.start_profile)
    stop_profile = _awaitable(EngineCore.stop_profile)
    resume_generation = _awaitable(EngineCore.resume)
    abort_named = _awaitable(EngineCore.abort_named)
    explain = _awaitable(EngineCore.explain)
    init_weight_transfer_engine = _awaitable(EngineCore.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _awaitable(EngineCore.shutdown_weight_transfer_engine)
    start_weight_update = _awaitable(EngineCore.start_weight_update)
    update_weights = _awaitable(EngineCore.update_weights)
    finish_weight_update = _awaitable(EngineCore.finish_weight_update)
    reload_weights = _awaitable(EngineCore.reload_weights)
    update_weight_version = _awaitable(EngineCore.update_weight_version)
    get_weight_version = _awaitable(EngineCore.get_weight_version)
    weight_info = _awaitable(EngineCore.weight_info)
    remove_lora = _awaitable(EngineCore.remove_lora)
    pin_lora = _awaitable(EngineCore.pin_lora)

    async def list_loras(self) -> set[int]:
        """The numbers (`lora_int_id`) of adapters on the device or in host memory."""
        return set(await self.call("list_loras"))

    inspect = _awaitable(EngineCore.inspect)
    timeline = _awaitable(EngineCore.timeline)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Schedule nothing until `resume_generation`; new requests wait meanwhile. Returns when nothing is computed any more.
        Raises RequestError: no such mode.

        Args:
            mode: what becomes of unfinished requests: `abort` ends them, `wait` lets them end first, `keep` has them go on later.
            clear_cache: forget the KV cache, for example because weights will change: what was kept is computed anew.
        """
        await self.call("pause", mode, clear_cache)
        await self._wait_until_drained()

    async def _wait_until_drained(self) -> None:
        while await self.call("pause_state") == PauseState.DRAINING:
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def is_paused(self) -> bool:
        """Whether nothing is scheduled, or new requests wait until what runs has ended."""
        return await self.call("pause_state") != PauseState.RUNNING

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause), 1 the KV cache, 2 the weights too. `mode`: what becomes
        of unfinished requests, as `pause_generation` has it.
        Raises RequestError: no such mode."""
        if mode == "wait" and level:
            await self.pause_generation(mode="wait", clear_cache=False)
            await self.call("sleep", level, "keep")
            await self.resume_generation()  # what came meanwhile goes on after `wake_up`
            return
        await self.call("sleep", level, mode)
        await self._wait_until_drained()

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker, or a function whose first argument is the worker.
        Raises RequestError: there is no such method, or workers in other processes cannot be sent a function.
        Raises TimeoutError: no answer within `timeout` seconds."""
        return await asyncio.wait_for(self.call("collective_rpc", method, timeout, list(args), kwargs), timeout)

    reset_encoder_cache = _awaitable(EngineCore.reset_encoder_cache)

    async def reset_mm_cache(self) -> None:
        """Forget media that this frontend has processed."""
        _forget_media(self)
