"""Where the results of steps in flight arrive on the host, each step's in a place of its own. Knows tokens and events."""

import dataclasses

import torch

from quire.core.output import IntArray
from quire.platforms.interface import DeviceEvent, DeviceRuntime

SPARE = 2
"""Steps whose results may be on their way at once, more than are ever in flight."""


@dataclasses.dataclass
class StepSlot:
    """Where a step's results arrive.

    Attributes:
        is_usual: later steps of its shape will take as long: nothing was prepared for these.
    """

    tokens_S: torch.Tensor
    tokens_array: IntArray
    begin: DeviceEvent
    drawn: DeviceEvent
    end: DeviceEvent
    is_usual: bool = dataclasses.field(default=True, init=False)

    @property
    def step_ms(self) -> float:
        """How long the device took until the tokens were drawn; 0 where that says nothing of other steps."""
        return self.drawn.milliseconds_since(self.begin) if self.is_usual else 0.0


class StepSlots:
    """As many as steps in flight need, taken in turn.

    Args:
        max_draws: tokens that a step draws at most.
        depth: steps in flight.
    """

    def __init__(self, runtime: DeviceRuntime, max_draws: int, depth: int) -> None:
        self._runtime, self._max_draws, self._count = runtime, max_draws, depth + SPARE
        self._slots: list[StepSlot] = []
        self._next = 0

    def allocate(self) -> None:
        """Take the memory."""
        for _ in range(self._count):
            tokens_S = self._runtime.pinned(torch.zeros(self._max_draws, dtype=torch.int32))
            self._slots.append(StepSlot(tokens_S, tokens_S.numpy(), *(self._runtime.event() for _ in range(3))))

    def clear(self) -> None:
        """Give it back."""
        self._slots.clear()
        self._next = 0

    def begin(self) -> StepSlot:
        """The place of a step that begins now."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.begin.record()
        return slot
