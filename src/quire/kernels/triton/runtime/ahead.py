"""A process that compiles kernels beside the engine's, and who waits for which of them.

It is started before torch is imported, so that compilers run while the engine imports, reads weights and makes its buffers. A
launch that needs a kernel which is being compiled waits for that one. Imports neither torch nor Triton.
"""

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from quire.kernels.triton.runtime import places
from quire.kernels.triton.runtime.places import Variant, identity
from quire.logger import init_logger
from quire.processes import start_child
from quire.timeline import STARTUP

logger = init_logger(__name__)

PATIENCE_S = 120.0
"""How long a launch waits for a kernel that another process compiles, before it compiles that itself."""

CHILD = "quire.kernels.triton.runtime.compile_worker:main"
"""What the process runs."""

FIRST, SOON, LATER, PERHAPS = 0, 1, 2, 3
"""How urgent kernels are: a request or a launch waits for them; steps need them; some request will; they are guessed."""


class CompilingProcess:
    """Compiles variants in several processes, the most urgent first.

    Args:
        capability: compute capability, 90 for 9.0.
        processes: compilers that run at a time.
        folder: where kernels go, if not to the usual cache.
    """

    def __init__(self, capability: int, processes: int, folder: Path | None = None) -> None:
        self._order = {
            "capability": capability,
            "processes": processes,
            "folder": str(folder) if folder else None,
            "packages": places.PACKAGES,
        }
        self._variants: list[Variant] = []
        self._pending: dict[str, int] = {}
        self._urgency: dict[str, int] = {}
        self._changed = threading.Condition()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_over = self._is_closing = False
        self.was_complete = True
        """Whether the process went on to the end of every list; false only once it has ended before."""
        self.errors: dict[str, str] = {}
        """Why a variant could not be compiled, by its identity."""
        self.seconds: dict[str, float] = {}
        """How long a variant took, by its identity."""
        pipe = subprocess.PIPE
        self._process = start_child(CHILD, stdin=pipe, stdout=pipe, stderr=pipe)
        self._threads = [
            threading.Thread(target=work, name=f"kernels-{work.__name__}", daemon=True)
            for work in (self._send, self._follow, self._listen)
        ]
        self._complaints: list[str] = []
        for thread in self._threads:
            thread.start()

    def add(self, variants: Sequence[Variant], urgency: int = SOON) -> None:
        """Compile these too, or sooner than was said before."""
        with self._changed:
            if self._is_over:
                return
            fresh: list[Variant] = []
            again: list[int] = []
            first = len(self._variants)
            for variant in variants:
                name = identity(variant)
                if name not in self._urgency:
                    self._pending[name] = first + len(fresh)
                    fresh.append(variant)
                elif urgency < self._urgency[name] and name in self._pending:
                    again.append(self._pending[name])
                self._urgency[name] = min(urgency, self._urgency.get(name, urgency))
            self._variants += fresh
        if fresh or again:
            order = {**self._order, "first": first, "variants": fresh, "again": again, "urgency": urgency}
            self._lines.put(json.dumps(order))

    def drop_guesses(self) -> None:
        """What is needed is known now: begin no more of what is only guessed."""
        self._lines.put(json.dumps({**self._order, "drop": PERHAPS, "first": 0, "variants": [], "again": []}))

    def finish(self) -> None:
        """Nothing more will be added: the process ends when it is through."""
        with self._changed:
            self._is_over = True
        self._lines.put(None)

    def _send(self) -> None:
        """A thread, because a pipe takes no more than its reader reads, and that one imports first."""
        stream = self._process.stdin
        assert stream is not None
        try:
            while (line := self._lines.get()) is not None:
                stream.write(f"{line}\n".encode())
                stream.flush()
            stream.close()
        except (OSError, ValueError) as error:
            logger.debug("the compiling process takes no more: %s", error)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints = [*self._complaints[-20:], line.decode(errors="replace")]

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with STARTUP.phase("kernels", is_beside=True) as phase:
            for line in self._process.stdout:
                number, seconds, error = line.decode(errors="replace").rstrip("\n").split(" ", 2)
                name = identity(self._variants[int(number)])
                with self._changed:
                    self._pending.pop(name, None)
                    self.seconds[name] = float(seconds)
                    if error:
                        self.errors[name] = error
                    self._changed.notify_all()
                phase.note = f"{len(self._variants) - len(self._pending) - len(self.errors)} compiled"
        self._process.wait()
        with self._changed:
            unfinished, self._pending, self._is_over = self._num_needed(), {}, True
            self.was_complete = not unfinished
            self._changed.notify_all()
        if unfinished and not self._is_closing:
            why = "".join(self._complaints).strip()[-600:] or f"exit code {self._process.returncode}"
            logger.warning("%d kernels were not compiled ahead, they will be when they are needed: %s", unfinished, why)

    def wait_for(self, variant: Variant) -> None:
        """Return when this variant is compiled, or cannot be; one that was not asked for before is compiled now."""
        self.add([variant], FIRST)
        name = identity(variant)
        with self._changed:
            self._changed.wait_for(lambda: name not in self._pending, PATIENCE_S)

    def has(self, variants: Sequence[Variant]) -> bool:
        """Whether none of these is still to be compiled."""
        with self._changed:
            return self._pending.keys().isdisjoint(map(identity, variants))

    def _num_needed(self) -> int:
        """With the lock held: what is still to be compiled, without guesses."""
        return sum(self._urgency[name] < PERHAPS for name in self._pending)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything that was added is compiled; whether it is. Guesses do not count."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_needed(), timeout)

    def close(self) -> None:
        """Stop compiling; may be called twice."""
        self._is_closing = True
        self.finish()
        if self._process.poll() is None:
            self._process.terminate()
        for thread in self._threads:
            thread.join(timeout=5)
