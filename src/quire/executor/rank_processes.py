"""The processes of an executor's ranks: started afresh, watched while they live, ended together.

One thread waits for their ends, whether the engine works or idles: when one ends, the others are ended too (they would wait for
it for ever), and the failure is there to be raised, with the rank, how it ended and its last words. Knows nothing of steps.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from quire.descriptors import memory_file
from quire.envs import with_defaults
from quire.errors import EngineError
from quire.executor import wire
from quire.executor.broadcast_ring import Broadcast, RingWriter
from quire.logger import init_logger
from quire.platforms.interface import WorkerProcess
from quire.processes import Child

logger = init_logger(__name__)

_GRACE_S = 0.3
"""After a first end: time for the others' last words, since the first to speak need not be the cause."""


class RankChild(Protocol):
    """A rank's process, as far as it is watched and ended; `quire.processes.Child` is one."""

    life_fd: int

    @property
    def pid(self) -> int: ...

    @property
    def process(self) -> Any:
        """Has `kill` and `wait`."""

    def end(self, patience_s: float) -> None:
        """Wait for its end; end it by force after so long."""

    def describe_exit(self) -> str:
        """How it ended."""
        ...

    def close(self) -> None:
        """Close this process's ends."""


class Rank:
    """One child, the pipe of its answers, and the last words that have come."""

    def __init__(self, child: RankChild, answers_fd: int) -> None:
        self.child, self.answers_fd = child, answers_fd
        self.last_words = b""

    def problem(self) -> wire.Problem:
        """Its last words; a process may die while it speaks."""
        try:
            return wire.decode_problem(self.last_words)
        except msgspec.DecodeError:
            return wire.Problem("engine", "its last words cannot be read")

    def close(self) -> None:
        """Close this process's ends of the pipes."""
        os.close(self.answers_fd)
        self.child.close()


class RankProcesses:
    """All ranks of one executor.

    Args:
        tensor_size: how many share a layer: these meet in one place, and the stages of a pipeline in another.
        ring: what they read; its descriptors are handed over to them.
        start_as: asked for each rank how its process starts.
        on_failure: called in the watching thread when a rank has ended by itself.
        meeting_places: addresses, of each stage's ranks and at last of the stages; empty: files of this host.

    Attributes:
        failure: why they are all gone, or None.
        failure_fd: readable from then on.
    """

    def __init__(
        self,
        size: int,
        tensor_size: int,
        ring: Broadcast,
        start_as: Callable[[int], WorkerProcess],
        on_failure: Callable[[], None],
        meeting_places: Sequence[str] = (),
    ) -> None:
        self.failure: EngineError | None = None
        self._ring, self._on_failure = ring, on_failure
        self._is_ending = self._is_closed = False
        self._lock = threading.Lock()
        self.failure_fd, self._failure_write_fd = os.pipe()
        self._stop_fd, self._stop_write_fd = os.pipe()
        # Files without names: nothing is left however all of them end.
        count = 0 if meeting_places else size // tensor_size + 1
        self._meeting_fds = [memory_file(0, "quire-ranks") for _ in range(count)]
        self._places = meeting_places or [f"file:///dev/fd/{descriptor}" for descriptor in self._meeting_fds]
        self._tensor_size = tensor_size
        self.ranks: list[Rank] = []
        try:
            for rank in range(size):
                self.ranks.append(self._spawn(rank, start_as(rank)))
        except BaseException:
            for started in self.ranks:
                started.child.end(0.0)
            raise
        finally:
            for descriptor in self._meeting_fds:
                os.close(descriptor)
            ring.hand_over()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.child.pid for rank in self.ranks]

    def _spawn(self, rank: int, options: WorkerProcess) -> Rank:
        assert isinstance(self._ring, RingWriter)
        answers_read, answers_write = os.pipe()
        ends = (self._ring.memory_fd, self._ring.reader_fds[rank], answers_write)
        inherited = (*self._meeting_fds, *ends)
        places = (self._places[rank // self._tensor_size], self._places[-1])
        words = [*map(str, (rank, len(self._ring.reader_fds), *ends)), *places]
        try:
            environment = with_defaults(options.environment)
            child = Child("quire.executor.worker_process:main", words, inherited, environment, kind="worker")
        except OSError:
            os.close(answers_read)
            raise
        finally:
            os.close(answers_write)
        if options.cores is not None:
            os.sched_setaffinity(child.pid, options.cores)
        return Rank(child, answers_read)

    # Watching.

    def _watch(self) -> None:
        ended = self._wait_for_ends()
        if not ended:
            return
        with self._lock:
            if self._is_ending:
                return
            cause = self._find_cause(ended)
            for rank in self.ranks:
                rank.child.process.kill()
            for rank in self.ranks:
                rank.child.process.wait()
            self.failure = EngineError(self._describe(cause))
        logger.error("%s; the other ranks were ended", self.failure)
        os.write(self._failure_write_fd, b"!")
        self._on_failure()

    def _wait_for_ends(self) -> list[int]:
        """Blocks until a rank ends by itself; returns those that do within the time of grace, in order. Empty when told to
        stop."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        by_fd = {rank.child.life_fd: number for number, rank in enumerate(self.ranks)}
        for descriptor in by_fd:
            poll.register(descriptor, select.POLLIN)
        ended: list[int] = []
        until: float | None = None
        while until is None or time.monotonic() < until:
            left = None if until is None else max(1.0, (until - time.monotonic()) * 1000)
            for descriptor, _ in poll.poll(left):
                if descriptor == self._stop_fd:
                    return []
                number = by_fd[descriptor]
                words = _read(descriptor)
                self.ranks[number].last_words += words
                if not words:
                    poll.unregister(descriptor)
                    ended.append(number)
                    until = until or time.monotonic() + _GRACE_S
            if len(ended) == len(self.ranks) or any(not self.ranks[number].last_words for number in ended):
                break  # one that says nothing was killed: it is the cause
        return ended

    def _find_cause(self, ended: list[int]) -> int:
        """The first rank that ended without a word (it was killed), else the one that was first in trouble."""
        silent = [number for number in ended if not self.ranks[number].last_words]
        if silent:
            return silent[0]
        return min(ended, key=lambda number: self.ranks[number].problem().at_ns)

    def _describe(self, number: int) -> str:
        rank = self.ranks[number]
        who = f"rank {number} (process {rank.child.pid})"
        how = rank.child.describe_exit()
        if not rank.last_words:
            return f"{who} {how}"
        return f"{who} {how}: {rank.problem().message}"

    # The end.

    def end(self, patience_s: float) -> None:
        """End all of them: in good order those that have been told to, within `patience_s`, the others by force. May be
        called twice."""
        with self._lock:
            self._is_ending = True
        deadline = time.monotonic() + patience_s
        for rank in self.ranks:
            rank.child.end(deadline - time.monotonic())
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.write(self._stop_write_fd, b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for rank in self.ranks:
            rank.close()
        for descriptor in (self.failure_fd, self._failure_write_fd, self._stop_fd, self._stop_write_fd):
            os.close(descriptor)
        self._ring.close()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # a connection that was cut off
        return b""
