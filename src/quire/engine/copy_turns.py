"""A core's steps with other copies, whose experts it shares: while any copy has work, each takes every step, with requests of its
own or with none."""

from quire.core.output import Turn
from quire.executor.interface import Executor


class CopyTurns:
    """One copy's steps without requests of its own. No step may be in flight when one begins.

    Attributes:
        is_awake: some copy may have work. A call wakes all copies; they rest again behind a step at which none had work, and
            all had heard the same calls: so none rests where another one waits for it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_calls = 0
        self.is_awake = False

    def wake(self, number: int) -> None:
        """A call has come, the `number`th to all copies."""
        self._num_calls, self.is_awake = max(number, self._num_calls), True

    def take(self, has_work: bool) -> None:
        """Take a step with the others."""
        self.is_awake = not self._may_leave(Turn.WAITS_FOR_WORK if has_work else Turn.NOTHING)

    def meet(self) -> None:
        """Take steps with the others until all copies are here."""
        while not self._may_leave(Turn.WAITS_FOR_ALL):
            pass

    def _may_leave(self, turn: Turn) -> bool:
        return all(self._executor.collective_rpc("take_part", (turn, self._num_calls)))
