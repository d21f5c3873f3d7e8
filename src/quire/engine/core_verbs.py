"""Verbs by which whoever runs the engine has its core keep adapters, list and forget them, and profile its workers' steps.

Knows which adapters have places on the device, and names of traces; what lies in host memory is asked of the workers.
"""

import re
from typing import Any

import msgspec

from quire import param_checks as checks
from quire.config.observability import profile_overrides
from quire.core.preparations import Preparations
from quire.core.scheduler import Scheduler
from quire.engine.weights import utility
from quire.errors import RequestError
from quire.executor.interface import Executor
from quire.request import EngineRequest, SchedulerStats


class ProfileVerbs:
    """The part of an engine core that takes profiles."""

    _executor: Executor

    @utility
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Profile the workers' steps from now on, as `profiler_config` says.
        Raises RequestError: profiles are off, one is being taken, or an argument cannot be used.

        Args:
            profile_prefix: how the traces' names begin.
            delay_iterations: steps to leave out first; max_iterations: steps after which it ends by itself.
            profiler_kwargs: further fields of `profiler_config` for this profile.
        """
        if profile_prefix is not None and not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", profile_prefix):
            checks.refuse("profile_prefix", profile_prefix, "up to 64 letters, digits, '-' and '_'")
        overrides = profile_overrides(delay_iterations, max_iterations, profiler_kwargs)
        problems = self._executor.collective_rpc("start_profile", (profile_prefix or "", overrides))
        if problems[0] is not None:
            raise RequestError(problems[0], param="profiler_config")

    @utility
    def stop_profile(self) -> list[str]:
        """End the profile; the files that were written. Raises RequestError: none is being taken."""
        results = self._executor.collective_rpc("stop_profile")
        if results[0]["problem"] is not None:
            raise RequestError(results[0]["problem"], param="profiler_config")
        return [result["file"] for result in results if result["file"] is not None]


class AdapterVerbs:
    """The part of an engine core that deals with adapters."""

    _executor: Executor
    _preparations: Preparations
    _scheduler: Scheduler

    def __init__(self) -> None:
        self._adapter_versions: dict[int, int] = {}

    def _settle_adapter(self, request: EngineRequest) -> None:
        """Give a request the version of its adapter that holds now; one that has the files read again begins another."""
        adapter = request.adapter
        if adapter is None:
            return
        self._preparations.adapters.came()
        version = self._adapter_versions.get(adapter.lora_int_id, 0)
        if adapter.load_inplace:
            version += 1
            self._adapter_versions[adapter.lora_int_id] = version
            is_pinned = adapter.lora_int_id in self._preparations.adapters.pinned
            self._preparations.adapters.remove(adapter.lora_int_id)
            if is_pinned:
                self._preparations.adapters.pinned.add(adapter.lora_int_id)
        if version or adapter.load_inplace:
            request.adapter = msgspec.structs.replace(adapter, load_inplace=False, version=version)

    def _tell_adapters(self, stats: SchedulerStats | None) -> None:
        """Complete a step's figures with what has changed about adapters."""
        news = None if stats is None else self._preparations.adapters.take_news()
        if stats is not None and news is not None:
            news.running, news.waiting = self._scheduler.inspection.adapters()
            stats.adapters = news

    @utility
    def list_loras(self) -> list[int]:
        """The numbers (`lora_int_id`) of adapters on the device or in host memory."""
        if self._executor.config.lora is None:
            return []
        on_device = {adapter.lora_int_id for adapter in self._preparations.adapters.loaded()}
        return sorted(on_device.union(*self._executor.collective_rpc("list_adapters")))

    @utility
    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that run with it go on. Whether it was on the device or in host memory."""
        if self._executor.config.lora is None:
            return False
        had_place = self._preparations.adapters.remove(lora_id)
        return any(self._executor.collective_rpc("forget_adapter", (lora_id,))) or had_place

    @utility
    def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter keep its place on the device, whatever others want.
        Raises RequestError: it has none, or no place would be left to change."""
        self._preparations.adapters.pin(lora_id)
        return True
