"""Starting copies that compute with one another's experts (`copy_turns.py`): they meet, and when one has ended, the others are
of no use, and all are started again. Some may be on hosts that join."""

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from quire.engine import core_process
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.messages import CoreMessage, Dead, Standing
from quire.engine.spare_core import SpareCores
from quire.errors import EngineDeadError
from quire.processes import Child


class Gathering:
    """Who starts the copies: has each wait for the others, tells where they meet, and ends all when one has ended.

    Args:
        new_place: gives an address of this host at which copies can meet.

    Attributes:
        seats: one for each copy.
        is_closed: none shall start any more.
    """

    def __init__(self, new_place: Callable[[], str], num_seats: int) -> None:
        self._new_place = new_place
        self._changed = threading.Condition()
        self._generation = 0
        self.is_closed = False
        self.seats = [CopySeat(self) for _ in range(num_seats)]

    def join(self, seat: "CopySeat", place: str | None = None) -> str:
        """A copy can start: waits until all can. Returns the address at which they meet, on the first one's host.
        Raises EngineDeadError: none shall start.

        Args:
            place: an address of its host, if that is another one."""
        with self._changed:
            seat.place = self._new_place() if place is None else place
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.is_closed or all(each.place for each in self.seats))
            if self.is_closed:
                raise EngineDeadError("the engine ends")
            seat.generation = self._generation
            return self.seats[0].place

    def is_current(self, generation: int) -> bool:
        """Whether no copy of this generation has ended."""
        with self._changed:
            return generation == self._generation and not self.is_closed

    def end(self, generation: int) -> bool:
        """A copy has ended. Whether it is the first one of its generation; then the others are ended."""
        with self._changed:
            if generation != self._generation or self.is_closed:
                return False
            self._generation += 1
            others = [seat for seat in self.seats if seat.generation == generation]
            for seat in others:
                seat.place = ""
        for seat in others:
            seat.kill()
        return True

    def close(self) -> None:
        """Let no copy start any more; those that wait for others at their start are ended."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for seat in self.seats:
            if seat.is_starting:
                seat.kill()


class CopySeat:
    """One copy's place: starts it, again and again. Starts a process as `SpareCores` does.

    Attributes:
        place: an address of its host at which copies can meet; empty: it cannot start yet.
        spares: where its processes come from, if some are kept.
        generation: of the copies that have started together.
        is_starting: it does not serve yet.
    """

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.spares: SpareCores | None = None
        self.place, self.generation, self.is_starting = "", -1, False
        self._kill: Callable[[], None] | None = None

    def join(self, place: str | None = None) -> str:
        """As `Gathering.join`."""
        return self._gathering.join(self, place)

    def start(self, words: Sequence[str], memory_fd: int) -> Child:
        """As `SpareCores.start`."""
        start = core_process.start if self.spares is None else self.spares.start
        child = start(words, memory_fd)
        self.hold(child.kill)
        return child

    def hold(self, kill: Callable[[], None]) -> None:
        """It starts; what ends it."""
        self._kill, self.is_starting = kill, True
        if not self._gathering.is_current(self.generation):
            kill()

    def refill(self, modules: Iterable[str]) -> None:
        """As `SpareCores.refill`."""
        if self.spares is not None:
            self.spares.refill(modules)

    def kill(self) -> None:
        """End it."""
        if self._kill is not None:
            self._kill()

    def leave(self) -> bool:
        """It has ended: the others are ended too. Whether it is the first one."""
        return self._gathering.end(self.generation)

    def open(
        self,
        start: Callable[[OnMessage, Standing | None], CoreClient],
        on_message: OnMessage,
        standing: Standing | None = None,
    ) -> CoreClient:
        """Start the copy, and again where another one ends before all serve. Of those that end together the first one is to
        blame, and its host alone is gone."""

        def hear(message: CoreMessage) -> None:
            if isinstance(message, Dead) and not self.leave():
                message = msgspec.structs.replace(message, is_blameless=True, is_gone=False)
            on_message(message)

        while True:
            try:
                client = start(hear, standing)
                self.is_starting = False
                return client
            except BaseException as error:
                is_first = self.leave()
                if is_first or self._gathering.is_closed or not isinstance(error, EngineDeadError):
                    raise


def place_in_folder() -> Callable[[], str]:
    """Places at which copies of one host meet: files that only they have."""
    folder, names = tempfile.TemporaryDirectory(prefix="quire-copies-"), itertools.count()
    return lambda: f"file://{folder.name}/{next(names)}"
