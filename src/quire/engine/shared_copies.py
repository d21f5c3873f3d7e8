"""Starting copies that compute with one another's experts (`copy_turns.py`): they meet, and when one has ended, the others are
of no use, and all are started again."""

import dataclasses
import tempfile
import threading
from collections.abc import Iterable, Sequence

import msgspec

from quire.config import EngineConfig
from quire.engine import core_process
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.messages import CoreMessage, Dead, Standing
from quire.engine.spare_core import SpareCores
from quire.errors import EngineDeadError
from quire.processes import Child


class Gathering:
    """Who starts the copies: tells each where it finds the others, and ends all when one has ended."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-copies-")
        self._lock = threading.Lock()
        self._generation = 0
        self._is_closed = False
        self._seats: list[CopySeat] = []

    def seat(self, spares: SpareCores | None) -> "CopySeat":
        """A place for one copy."""
        self._seats.append(seat := CopySeat(self, spares))
        return seat

    def join(self, seat: "CopySeat") -> str:
        """A copy is going to start: the address at which it finds the others. Raises EngineDeadError: none shall start."""
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine ends")
            seat.generation = self._generation
            return f"file://{self._folder.name}/{self._generation}"

    def is_current(self, generation: int) -> bool:
        """Whether no copy of this generation has ended."""
        with self._lock:
            return generation == self._generation

    def end(self, generation: int) -> bool:
        """A copy has ended. Whether it is the first one of its generation; then the others are ended."""
        with self._lock:
            if generation != self._generation or self._is_closed:
                return False
            self._generation += 1
            others = [seat for seat in self._seats if seat.generation == generation]
        for seat in others:
            seat.kill()
        return True

    def close(self) -> None:
        """No copy shall start any more; those that wait for others at their start are ended."""
        with self._lock:
            self._is_closed = True
        for seat in self._seats:
            if seat.is_starting:
                seat.kill()


class CopySeat:
    """One copy's place: starts its process, again and again, as `SpareCores` does.

    Attributes:
        generation: of the copies that have started together.
        is_starting: its process does not serve yet.
    """

    def __init__(self, gathering: Gathering, spares: SpareCores | None) -> None:
        self._gathering, self.spares = gathering, spares
        self.generation, self.is_starting = -1, False
        self._child: Child | None = None

    def start(self, words: Sequence[str], memory_fd: int) -> Child:
        """As `SpareCores.start`."""
        start = core_process.start if self.spares is None else self.spares.start
        self._child, self.is_starting = start(words, memory_fd), True
        if not self._gathering.is_current(self.generation):
            self.kill()
        return self._child

    def refill(self, modules: Iterable[str]) -> None:
        """As `SpareCores.refill`."""
        self.is_starting = False
        if self.spares is not None:
            self.spares.refill(modules)

    def kill(self) -> None:
        """End its process."""
        if self._child is not None:
            self._child.kill()

    def open(
        self, make: "type[CoreClient]", config: EngineConfig, on_message: OnMessage, standing: Standing | None = None
    ) -> CoreClient:
        """Start the copy. Of those that end together the first one is to blame."""
        address, parallel = self._gathering.join(self), config.parallel
        generation = self.generation
        config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, copies_rendezvous=address))

        def hear(message: CoreMessage) -> None:
            if isinstance(message, Dead) and not self._gathering.end(generation):
                message = msgspec.structs.replace(message, is_blameless=True)
            on_message(message)

        try:
            return make(config, hear, standing, spares=self)  # pyright: ignore[reportCallIssue]
        except BaseException:
            self._gathering.end(generation)
            raise
