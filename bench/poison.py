"""An executor that dies of one prompt, for `bench/chaos.py`: what a kernel does that fails for one request's shape."""

import os
import signal

from quire.core.output import SchedulerOutput
from quire.executor.uniproc import UniprocExecutor

POISON = [7] * 24
"""The token ids that a deadly prompt begins with."""


class PoisonedExecutor(UniprocExecutor):
    """Kills its process where a step begins a deadly prompt."""

    def execute(self, step: SchedulerOutput) -> None:
        if any(request.token_ids[: len(POISON)].tolist() == POISON for request in step.new_requests):
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute(step)
