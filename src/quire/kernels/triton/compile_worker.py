"""The process that `ahead` starts: it imports the kernels once, without torch, and forks children that share a list.

Each line of its input is a list; each line of its output is a number in that list whose kernel is compiled, the seconds that
it took, and an error if it could not be. It never touches a GPU. It ends with its input, and its children with it.
"""

import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire.kernels.triton import without_torch

NICENESS = 5
"""The engine's own process goes first where there are few cores."""
_NUMBER = struct.Struct("i")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read lists and compile them until the input ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # what the compiler prints is not for our reader
    _end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    without_torch.install()
    for line in sys.stdin:
        _compile_list(json.loads(line), output)


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _compile_list(order: dict[str, Any], output: int) -> None:
    from quire.kernels.triton import cache, places, variants

    places.PACKAGES = tuple(order["packages"])
    cache.install(Path(order["folder"]) if order["folder"] else None)

    def report(number: int, seconds: float = 0.0, error: Exception | None = None) -> None:
        text = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        os.write(output, f"{order['first'] + number} {seconds:.3f} {text}\n".encode())

    def work(number: int) -> None:
        begin = time.monotonic()
        try:
            variants.compile_variant(order["variants"][number], order["capability"])
            report(number, time.monotonic() - begin)
        except Exception as error:
            report(number, error=error)

    found: list[int] = []
    for number, variant in enumerate(order["variants"]):
        try:
            variants.source_of(variant).hash()  # imports what the children then share
            found.append(number)
        except Exception as error:
            is_stale = isinstance(error, variants.StaleVariant)
            if not is_stale and without_torch.remove(
                [package for package in order["packages"] if package != "triton."]
            ):
                return _compile_list(order, output)
            report(number, error=error)
    _share(found, order["processes"], work)
    return None


def _share(numbers: list[int], processes: int, work: Callable[[int], None]) -> None:
    """Forked children take numbers from one pipe until it is empty: the quick help the slow."""
    source, sink = os.pipe()
    children: list[int] = []
    for _ in range(min(processes, len(numbers))):
        child = os.fork()
        if not child:
            status = 1
            try:
                os.close(sink)
                _end_with_parent()
                for number in _numbers_from(source):
                    work(number)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(source)
    with contextlib.suppress(BrokenPipeError):
        for number in numbers:
            os.write(sink, _NUMBER.pack(number))
    os.close(sink)
    for child in children:
        os.waitpid(child, 0)


def _numbers_from(source: int) -> Iterator[int]:
    """Whole numbers: a read of so few bytes from a pipe is never divided among readers."""
    while data := os.read(source, _NUMBER.size):
        yield _NUMBER.unpack(data)[0]


if __name__ == "__main__":
    main()
