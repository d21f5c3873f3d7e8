"""The process that `ahead` starts: it imports the kernels once, without torch, and forks compilers that it hands out kernels to.

Each line of its input is an order: kernels with their numbers and how urgent they are. Each line of its output is a number whose
kernel is compiled, the seconds that it took, and an error if it could not be. What is more urgent is compiled first, also where
it was ordered later; a number that is ordered again becomes as urgent as the new order says, and an order may drop what is not
urgent. It never touches a GPU. It ends with its input, and its compilers with it.
"""

import contextlib
import ctypes
import heapq
import json
import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from quire.kernels.triton.runtime import without_torch

NICENESS = 5
"""The engine's own process goes first where there are few cores."""
_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 16


def main(arguments: list[str]) -> None:
    """Take orders and have them compiled until the input ends and all is done."""
    del arguments
    output = os.dup(1)
    os.dup2(2, 1)  # what the compiler prints is not for our reader
    _end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    without_torch.install()
    _Pool(output).run()


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Pool:
    """The orders that are not done, and the compilers.

    Args:
        output: file descriptor of the reports.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._waiting: list[tuple[int, int]] = []
        self._variants: dict[int, Any] = {}
        self._idle: list[socket.socket] = []
        self._busy: dict[socket.socket, int] = {}
        self._settings: dict[str, Any] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the input has ended and nothing is left to do."""
        self._selector.register(0, selectors.EVENT_READ)
        text, has_input = b"", True
        while has_input or self._busy or self._waiting:
            for key, _ in self._selector.select():
                if key.fd != 0:
                    self._take_back(key.fileobj)  # type: ignore[arg-type]
                    continue
                data = os.read(0, _CHUNK)
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self._take_order(json.loads(line))
                if not data:
                    has_input = False
                    self._selector.unregister(0)
            self._hand_out()

    def _take_order(self, order: dict[str, Any]) -> None:
        from quire.kernels.triton.runtime import cache, places, variants

        self._settings = order
        places.PACKAGES = tuple(order["packages"])  # each time: the modules may have been imported anew
        cache.install(Path(order["folder"]) if order["folder"] else None)
        if "drop" in order:
            self._waiting = [entry for entry in self._waiting if entry[0] < order["drop"]]
            heapq.heapify(self._waiting)
        for number in order["again"]:
            if number in self._variants:
                heapq.heappush(self._waiting, (order["urgency"], number))
        for number, variant in enumerate(order["variants"], start=order["first"]):
            try:
                variants.source_of(variant).hash()  # imports and reads what compilers then share
            except Exception as error:
                is_stale = isinstance(error, variants.StaleVariant)
                if not is_stale and self._use_torch():
                    return self._take_order(
                        {**order, "first": number, "variants": order["variants"][number - order["first"] :]}
                    )
                self._report(number, error=error)
                continue
            self._variants[number] = variant
            heapq.heappush(self._waiting, (order["urgency"], number))
        return None

    def _use_torch(self) -> bool:
        """A kernel's module computes with torch: import the real one. Compilers that have the stand-in end when they are idle."""
        packages = [package for package in self._settings["packages"] if package != "triton."]
        if not without_torch.remove(packages):
            return False
        for compiler in self._idle:
            self._selector.unregister(compiler)
            compiler.close()
        self._idle.clear()
        return True

    def _hand_out(self) -> None:
        """Give the most urgent kernels to compilers that are idle; start as many as are allowed."""
        while self._waiting and (self._idle or len(self._busy) < self._settings["processes"]):
            _, number = heapq.heappop(self._waiting)
            variant = self._variants.pop(number, None)
            if variant is None:  # ordered twice, and given to a compiler already
                continue
            compiler = self._idle.pop() if self._idle else self._fork()
            self._busy[compiler] = number
            compiler.sendall(json.dumps([number, variant]).encode() + b"\n")

    def _take_back(self, compiler: socket.socket) -> None:
        """A compiler says that it is idle, or has died."""
        number = self._busy.pop(compiler)
        if compiler.recv(1):
            self._idle.append(compiler)
        else:
            self._report(number, error=RuntimeError("the compiler has crashed"))
            self._selector.unregister(compiler)
            compiler.close()

    def _fork(self) -> socket.socket:
        """A new compiler, by the end of its socket that is ours."""
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            self._selector.register(ours, selectors.EVENT_READ)
            return ours
        status = 1
        try:
            ours.close()
            for other in (*self._idle, *self._busy):  # a socket that a sibling holds too would never end
                other.close()
            os.close(0)
            _end_with_parent()
            for line in theirs.makefile("rb"):
                self._compile(*json.loads(line))
                theirs.sendall(b".")
            status = 0
        finally:
            os._exit(status)

    def _compile(self, number: int, variant: Any) -> None:
        """In a compiler."""
        from quire.kernels.triton.runtime import variants

        begin = time.monotonic()
        try:
            variants.compile_variant(variant, self._settings["capability"])
            self._report(number, time.monotonic() - begin)
        except Exception as error:
            self._report(number, error=error)

    def _report(self, number: int, seconds: float = 0.0, error: Exception | None = None) -> None:
        text = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        os.write(self._output, f"{number} {seconds:.3f} {text}\n".encode())


if __name__ == "__main__":
    main()
