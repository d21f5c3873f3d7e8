"""Control verbs of an engine core: profiles of its workers' steps. Knows names of traces; leaves profiles to workers."""

import re
from typing import Any

from quire import param_checks as checks
from quire.config.observability import profile_overrides
from quire.engine.weights import utility
from quire.errors import RequestError
from quire.executor.interface import Executor


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
