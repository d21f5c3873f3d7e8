"""The processes of an executor's ranks: started afresh, watched while they live, ended together.

One thread waits for their ends, whether the engine works or idles: when one ends, the others are ended too (they would wait for
it for ever), and the failure is there to be raised, with the rank, how it ended and its last words. Knows nothing of steps.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec

from quire import envs
from quire.errors import EngineError
from quire.executor import wire
from quire.executor.broadcast_ring import RingWriter
from quire.logger import init_logger
from quire.processes import start_child

logger = init_logger(__name__)

_GRACE_S = 0.3
"""After a first end: time for the others' last words, since the first to speak need not be the cause."""
_HELD_BACK = {signal.SIGINT, signal.SIGTERM}


class _Rank:
    """One child and this process's ends of its pipes."""

    def __init__(self, process: "subprocess.Popen[bytes]", answers_fd: int, last_words_fd: int, parent_fd: int) -> None:
        self.process = process
        self.answers_fd, self.last_words_fd, self.parent_fd = answers_fd, last_words_fd, parent_fd
        self.last_words = b""

    def problem(self) -> wire.Problem:
        """Its last words; a process may die while it speaks."""
        try:
            return wire.decode_problem(self.last_words)
        except msgspec.DecodeError:
            return wire.Problem("engine", "its last words cannot be read")

    def close(self) -> None:
        """Close this process's ends; the child ends by that, if nothing else ended it."""
        for descriptor in (self.answers_fd, self.last_words_fd, self.parent_fd):
            os.close(descriptor)


class RankProcesses:
    """All ranks of one executor.

    Args:
        ring: what they read; its descriptors are handed over to them.
        on_failure: called in the watching thread when a rank has ended by itself.

    Attributes:
        failure: why they are all gone, or None.
        failure_fd: readable from then on.
    """

    def __init__(self, size: int, ring: RingWriter, on_failure: Callable[[], None]) -> None:
        self.failure: EngineError | None = None
        self._ring, self._on_failure = ring, on_failure
        self._is_ending = self._is_closed = False
        self._lock = threading.Lock()
        self.failure_fd, self._failure_write_fd = os.pipe()
        self._stop_fd, self._stop_write_fd = os.pipe()
        self._folder = tempfile.mkdtemp(prefix="quire-ranks-", dir=envs.QUIRE_RPC_BASE_PATH)
        self.ranks: list[_Rank] = []
        try:
            for rank in range(size):
                self.ranks.append(self._spawn(rank, size))
        except BaseException:
            for started in self.ranks:
                started.process.kill()
                started.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            ring.hand_over()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self.ranks]

    def _spawn(self, rank: int, size: int) -> _Rank:
        answers_read, answers_write = os.pipe()
        words_read, words_write = os.pipe()
        parent_read, parent_write = os.pipe()
        inherited = (self._ring.memory_fd, self._ring.reader_fds[rank], answers_write, words_write, parent_read)
        words = [str(rank), str(size), f"file://{self._folder}/meet", *map(str, inherited)]
        # The child begins with both signals held back, so that none can end it before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            process = start_child("quire.executor.worker_process:main", words, keep=inherited, stdin=subprocess.DEVNULL)
        except OSError:
            for descriptor in (answers_read, words_read, parent_write):
                os.close(descriptor)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for descriptor in (answers_write, words_write, parent_read):
                os.close(descriptor)
        return _Rank(process, answers_read, words_read, parent_write)

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
                rank.process.kill()
            for rank in self.ranks:
                rank.process.wait()
            self.failure = EngineError(self._describe(cause))
        logger.error("%s; the other ranks were ended", self.failure)
        os.write(self._failure_write_fd, b"!")
        self._on_failure()

    def _wait_for_ends(self) -> list[int]:
        """Blocks until a rank ends by itself; returns those that do within the time of grace, in order. Empty when told to
        stop."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        by_fd = {rank.last_words_fd: number for number, rank in enumerate(self.ranks)}
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
                words = os.read(descriptor, 1 << 16)
                self.ranks[number].last_words += words
                if not words:
                    poll.unregister(descriptor)
                    ended.append(number)
                    until = until or time.monotonic() + _GRACE_S
            if len(ended) == len(self.ranks):
                break
        return ended

    def _find_cause(self, ended: list[int]) -> int:
        """The first rank that ended without a word (it was killed), else the one that was first in trouble."""
        silent = [number for number in ended if not self.ranks[number].last_words]
        if silent:
            return silent[0]
        return min(ended, key=lambda number: self.ranks[number].problem().at_ns)

    def _describe(self, number: int) -> str:
        rank = self.ranks[number]
        who = f"rank {number} (process {rank.process.pid})"
        how = _describe_exit(rank.process.wait())
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.01, deadline - time.monotonic()))
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
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
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe_exit(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
