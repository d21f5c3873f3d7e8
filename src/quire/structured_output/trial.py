"""Grammars are tried in a process of their own before anybody relies on them: one that explodes is killed with it.

A child is given the vocabulary once, then one grammar after another, and says of each whether it compiles. It has so much
time and memory for each; where it needs more, or dies, the grammar is refused and the next one gets a fresh child. Children
start when they are needed and end with this process. Knows nothing of rows or masks.
"""

import atexit
import contextlib
import queue
import subprocess
import time
import weakref

import msgspec

from quire.config import limits
from quire.descriptors import wait_readable
from quire.errors import CapacityError, RequestError
from quire.processes import read_message, start_child, write_message
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary

_MOST_CHILDREN = 2
_START_S = 120.0
"""How long a child may take to import its engine and read the vocabulary."""


class Begin(msgspec.Struct):
    """The first message to a child."""

    backend: str
    eos_token_ids: list[int]
    tokens: list[bytes]
    special_ids: list[int]
    memory_bytes: int


class Verdict(msgspec.Struct):
    """A child's answer; of the vocabulary it says only that it has it."""

    error: str | None = None
    param: str | None = None


class _Child:
    """One process. Not for several threads at once."""

    def __init__(self, begin: Begin) -> None:
        function, pipe = "quire.structured_output.trial_process:main", subprocess.PIPE
        self._process = start_child(function, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._end = weakref.finalize(self, _end, self._process)
        if self._ask(begin, _START_S) is None:
            self.kill()
            message = "the process that tries grammars could not be started; the server's log may say more"
            raise RequestError(message, param="structured_outputs")

    def try_grammar(self, params: StructuredOutputsParams, seconds: float) -> Verdict | None:
        """What becomes of a grammar; None where the child did not live to tell, and is of no use any more."""
        return self._ask(params, seconds)

    def _ask(self, message: msgspec.Struct, seconds: float) -> Verdict | None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            write_message(process.stdin.fileno(), msgspec.msgpack.encode(message))
            answers = process.stdout.fileno()
            data = read_message(answers) if wait_readable(answers, seconds) else None
        except OSError:
            return None
        return None if data is None else msgspec.msgpack.decode(data, type=Verdict)

    def kill(self) -> None:
        """May be called twice."""
        self._end()


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
        for _ in range(_MOST_CHILDREN):
            self._places.put(None)
        atexit.register(self.close)

    def check(self, params: StructuredOutputsParams) -> None:
        """
        Raises:
            RequestError: the grammar does not compile, or not with the time and memory that it may take.
            CapacityError: others are being tried, and take their time.
        """
        try:
            child = self._places.get(timeout=limits.MAX_GRAMMAR_SECONDS)
        except queue.Empty:
            raise CapacityError("too many grammars are being tried", retry_after=limits.MAX_GRAMMAR_SECONDS) from None
        try:
            child = child or _Child(self._begin)
            began = time.monotonic()
            verdict = child.try_grammar(params, limits.MAX_GRAMMAR_SECONDS)
            if verdict is None and time.monotonic() - began < limits.MAX_GRAMMAR_SECONDS:
                child.kill()  # it died: of this grammar, or of something else, which a second child will not
                child = _Child(self._begin)
                began = time.monotonic()
                verdict = child.try_grammar(params, limits.MAX_GRAMMAR_SECONDS)
            took = time.monotonic() - began
            if verdict is None:
                child.kill()
                child = None
        except BaseException:
            child = None
            raise
        finally:
            self._places.put(child)
        if verdict is None:
            what = (
                f"takes longer than {limits.MAX_GRAMMAR_SECONDS} s to compile"
                if took >= limits.MAX_GRAMMAR_SECONDS
                else f"takes more than {limits.MAX_GRAMMAR_MEMORY_BYTES >> 20} MiB of memory to compile"
            )
            kind, _ = params.constraint()
            raise RequestError(f"structured_outputs.{kind}: the grammar {what}; use a smaller one", param=kind)
        if verdict.error is not None:
            raise RequestError(verdict.error, param=verdict.param or "structured_outputs")

    def close(self) -> None:
        """End the children that do nothing; the others end with this process."""
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Empty):
            while True:
                child = self._places.get_nowait()
                if child is not None:
                    child.kill()
