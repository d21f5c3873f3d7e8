"""The child of `trial`: compiles grammars on its standard input and says what became of them. It may be killed at any time."""

import contextlib
import os
import resource
import signal
from pathlib import Path

import msgspec

from quire.errors import RequestError
from quire.processes import read_message, write_message
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import find_backend
from quire.structured_output.trial import Begin, Verdict
from quire.structured_output.vocabulary import Vocabulary


def main(arguments: list[str]) -> None:
    """Serve until the input ends."""
    del arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    requests, answers = 0, os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    data = read_message(requests)
    if data is None:
        return
    begin = msgspec.msgpack.decode(data, type=Begin)
    vocabulary = Vocabulary(begin.tokens, begin.special_ids, lambda text: [])
    backend = find_backend(begin.backend)(vocabulary, tuple(begin.eos_token_ids))
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
    """Not more than now and so many bytes, where the system counts them."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
