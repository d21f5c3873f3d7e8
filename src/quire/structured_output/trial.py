"""Grammars are tried in a process of their own before anything relies on them: one that explodes is killed with it.

A child gets the vocabulary once, then one grammar after another, and says of each whether it compiles. Each may take so much
time and memory; where it needs more, or the child dies, the grammar is refused and the next one gets a fresh child. Children
start when they are needed and end with this process. Knows nothing of rows or masks.
"""

import atexit
import contextlib
import os
import queue
import resource
import signal
import subprocess
import weakref
from pathlib import Path

import msgspec

from quire.config import limits
from quire.descriptors import wait_readable
from quire.errors import CapacityError, EngineError, RequestError, describe
from quire.processes import read_message, start_child, write_message
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import find_backend
from quire.structured_output.vocabulary import Vocabulary

_MAX_CHILDREN = 2
_START_S = 120.0
"""Seconds in which a child imports its engine and reads the vocabulary."""


class Begin(msgspec.Struct):
    """The first message to a child."""

    backend: str
    eos_token_ids: list[int]
    tokens: list[bytes]
    special_ids: list[int]
    memory_bytes: int


class Verdict(msgspec.Struct):
    """A child's answer. Of the vocabulary it says only that it has it, or why its engine cannot be used."""

    error: str | None = None
    param: str | None = None


class _Child:
    """One process. Not for several threads at once.

    Attributes:
        is_late: the last message was not answered in time.
    """

    def __init__(self, begin: Begin) -> None:
        pipe = subprocess.PIPE
        self._process = start_child(f"{__name__}:serve", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.end = weakref.finalize(self, _end, self._process)
        self.is_late = False
        ready = self.ask(begin, _START_S)
        if ready is None or ready.error is not None:
            self.end()
            why = "it died" if ready is None else ready.error
            raise EngineError(f"the process that tries grammars could not be started: {why}")

    def ask(self, message: msgspec.Struct, seconds: float) -> Verdict | None:
        """The answer; None where the child died, or is ended here because it needs longer."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        data = None
        with contextlib.suppress(OSError):
            write_message(requests.fileno(), msgspec.msgpack.encode(message))
            self.is_late = not wait_readable(answers.fileno(), seconds)
            data = None if self.is_late else read_message(answers.fileno())
        if data is None:
            self.end()
            return None
        return msgspec.msgpack.decode(data, type=Verdict)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Trials:
    """Children that try grammars of one vocabulary with one engine. For several threads; two grammars are tried at a time."""

    def __init__(self, backend: str, eos_token_ids: tuple[int, ...], vocabulary: Vocabulary) -> None:
        memory = limits.MAX_GRAMMAR_MEMORY_BYTES
        self._begin = Begin(backend, list(eos_token_ids), vocabulary.tokens, vocabulary.special_ids, memory)
        self._places: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(_MAX_CHILDREN):
            self._places.put(None)
        atexit.register(self.close)

    def begin(self) -> None:
        """Have a child that waits for the first grammar."""
        child = self._places.get()
        try:
            child = child or _Child(self._begin)
        finally:
            self._places.put(child)

    def check(self, params: StructuredOutputsParams) -> None:
        """Wait until a child has compiled the grammar.

        Raises:
            RequestError: the grammar does not compile, or not with the time and memory that it may take.
            CapacityError: others are being tried, and take their time.
        """
        seconds, verdict, is_late = limits.MAX_GRAMMAR_SECONDS, None, False
        try:
            child = self._places.get(timeout=seconds)
        except queue.Empty:
            raise CapacityError("too many grammars are being tried", retry_after=seconds) from None
        try:
            child = child or _Child(self._begin)
            verdict = child.ask(params, seconds)
            if verdict is None and not child.is_late:
                # The child died: of this grammar, or of something else, of which a second child does not die.
                child = _Child(self._begin)
                verdict = child.ask(params, seconds)
            is_late = child.is_late
        finally:
            self._places.put(None if verdict is None else child)
        if verdict is None:
            memory = f"takes more than {limits.MAX_GRAMMAR_MEMORY_BYTES >> 20} MiB of memory"
            what = f"takes longer than {seconds} s" if is_late else memory
            kind, _ = params.constraint()
            message = f"structured_outputs.{kind}: the grammar {what} to compile; use a smaller one"
            raise RequestError(message, param=kind)
        if verdict.error is not None:
            raise RequestError(verdict.error, param=verdict.param or "structured_outputs")

    def close(self) -> None:
        """End the idle children; the others end with this process."""
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Empty):
            while True:
                child = self._places.get_nowait()
                if child is not None:
                    child.end()


# --- in the child, which may be killed at any time ---


def serve(arguments: list[str]) -> None:
    """Answer messages on the standard input until it ends."""
    del arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    requests, answers = 0, os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    data = read_message(requests)
    if data is None:
        return
    begin = msgspec.msgpack.decode(data, type=Begin)
    vocabulary = Vocabulary(begin.tokens, begin.special_ids, lambda text: [])
    try:
        backend = find_backend(begin.backend)(vocabulary, tuple(begin.eos_token_ids))
    except Exception as error:  # told to the parent, as this process has no log
        write_message(answers, msgspec.msgpack.encode(Verdict(describe(error))))
        return
    _limit_memory(begin.memory_bytes)
    write_message(answers, msgspec.msgpack.encode(Verdict()))
    while (data := read_message(requests)) is not None:
        try:
            backend.compile(msgspec.msgpack.decode(data, type=StructuredOutputsParams))
            verdict = Verdict()
        except RequestError as error:
            verdict = Verdict(str(error), error.param)
        except MemoryError:
            os._exit(1)
        except Exception as error:  # whatever an engine stumbles over is the grammar's fault
            verdict = Verdict(f"the grammar cannot be used: {type(error).__name__}: {str(error)[:400]}", None)
        write_message(answers, msgspec.msgpack.encode(verdict))


def _limit_memory(more: int) -> None:
    """Allow this process so many bytes more than it has now, where the system counts them."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
