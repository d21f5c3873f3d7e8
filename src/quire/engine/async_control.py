"""What an asynchronous engine may be told besides requests: to pause, to sleep, to forget, to measure.

Each is a call of the core's (`messages.Utility`). Knows no requests but by their ids.
"""

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.observability import profile_overrides
from quire.engine.llm_engine import check_profile_prefix, check_profile_started, profile_files
from quire.engine.messages import Utility
from quire.engine.pausing import PauseState, check_mode

_DRAIN_CHECK_S = 0.01
"""Between two looks at whether everybody's requests have ended."""


class AsyncControl(abc.ABC):
    """The verbs of `AsyncLLM` that are about the engine as a whole."""

    @abc.abstractmethod
    async def _call(self, utility: Utility, *args: Any) -> Any:
        """Call a utility of the core and wait for its value."""

    @abc.abstractmethod
    def _abort_all(self) -> None:
        """End this frontend's requests."""

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Schedule nothing until `resume_generation`; new requests wait meanwhile. Returns when nothing is computed any more.
        Raises RequestError: no such mode.

        Args:
            mode: what becomes of unfinished requests: `abort` ends them, `wait` lets them end first, `keep` lets them stand still
                and go on later.
            clear_cache: forget the KV cache, for example because weights will change: what stands still is computed anew.
        """
        check_mode(mode)
        if mode == "abort":
            self._abort_all()
        await self._call(Utility.PAUSE, mode, clear_cache)
        while mode == "wait" and await self._call(Utility.PAUSE_STATE) == PauseState.DRAINING:
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def resume_generation(self) -> None:
        await self._call(Utility.RESUME)

    async def is_paused(self) -> bool:
        """Whether nothing is scheduled, or new requests wait until what runs has ended."""
        return await self._call(Utility.PAUSE_STATE) != PauseState.RUNNING

    async def abort_named(self, request_ids: Sequence[str]) -> int:
        """End requests of every frontend, by the ids that a server's clients know; how many sequences that were."""
        return await self._call(Utility.ABORT_NAMED, list(request_ids))

    async def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back until `wake_up(["kv_cache"])`; unfinished requests stand still, and are computed
        anew."""
        await self._call(Utility.RELEASE_KV_CACHE)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; with `reset_running_requests` these compute theirs again. There is no connector."""
        del reset_connector
        return bool(await self._call(Utility.RESET_PREFIX_CACHE, reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause), 1 the KV cache, 2 the weights too. `mode`: what becomes
        of unfinished requests, as `pause_generation` has it.
        Raises RequestError: no such mode."""
        check_mode(mode)
        if mode == "abort":
            self._abort_all()
        elif mode == "wait" and level:
            await self.pause_generation(mode="wait", clear_cache=False)
            await self._call(Utility.SLEEP, level, "keep")
            await self.resume_generation()  # what came meanwhile goes on after `wake_up`
            return
        await self._call(Utility.SLEEP, level, mode)
        while mode == "wait" and await self._call(Utility.PAUSE_STATE) == PauseState.DRAINING:
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or `weights`, `kv_cache` or `scheduling` (a pause) alone; whether nothing sleeps any more."""
        return bool(await self._call(Utility.WAKE_UP, tags))

    async def is_sleeping(self) -> bool:
        return bool(await self._call(Utility.IS_SLEEPING))

    async def explain(self) -> dict[str, Any]:
        return await self._call(Utility.EXPLAIN)

    async def inspect(self) -> dict[str, Any]:
        """The scheduler's state, its last steps, live and finished requests."""
        return await self._call(Utility.INSPECT)

    async def timeline(self, request_id: str) -> dict[str, Any] | None:
        """What happened to a request of this id, or of one whose id holds it; None where it is not remembered."""
        return await self._call(Utility.TIMELINE, request_id)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Profile the workers' steps from now on, as `EngineControl.start_profile` does.
        Raises RequestError: profiles are off, one is being taken, or an argument cannot be used."""
        overrides = profile_overrides(delay_iterations, max_iterations, profiler_kwargs)
        args = [check_profile_prefix(profile_prefix), overrides]
        check_profile_started(await self._call(Utility.COLLECTIVE_RPC, "start_profile", args))

    async def stop_profile(self) -> list[str]:
        """End the profile; the files that were written. Raises RequestError: none is being taken."""
        return profile_files(await self._call(Utility.COLLECTIVE_RPC, "stop_profile", []))

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
        call = self._call(Utility.COLLECTIVE_RPC, method, list(args), kwargs, timeout)
        return await asyncio.wait_for(call, timeout)

    async def reset_mm_cache(self) -> None:
        """Forget media that were prepared. None are kept: no model reads media yet."""

    async def reset_encoder_cache(self) -> None:
        """Forget encoders' outputs. None are kept: no model reads media yet."""
