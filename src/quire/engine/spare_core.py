"""A process that has imported what an engine core needs, and waits to become one: the core after a death starts without imports.

On a GPU the imports are half of a core's start. A spare has no device context and no device memory; it costs the host memory of
its modules. It learns what to import from the core that runs. Knows nothing of requests or weights.
"""

import contextlib
import importlib
import json
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence

from quire.config import EngineConfig
from quire.engine import core_process
from quire.logger import init_logger, set_process_label
from quire.platforms import current_platform
from quire.processes import Child, begin_child, name_process

logger = init_logger(__name__)

IMPORTED = frozenset({"quire", "torch", "triton"})
"""Packages whose modules a spare imports by itself. Others come with them, or when a core asks for them: nothing foreign shall
touch a device before there is a core."""
WARMING, WARM = "quire warming", "quire spare"
"""What the process is called while it imports, and then."""
_MAX_WORDS = 1 << 16


def wants_spare(config: EngineConfig) -> bool:
    """Whether a spare is kept: as the user says; else for one device beside the host. Ranks would import for themselves."""
    parallel = config.parallel
    if parallel.spare_core is not None:
        return parallel.spare_core
    on_host = current_platform(config.device.device).capabilities().computes_on_host
    return not on_host.value and parallel.world_size == 1


class SpareCores:
    """Starts core processes, from a spare where there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        self._is_closed = False
        self._end = weakref.finalize(self, _end_all, self._spares)

    @property
    def pid(self) -> int | None:
        """The spare's process."""
        with self._lock:
            return self._spares[0].child.pid if self._spares else None

    def start(self, words: Sequence[str], memory_fd: int) -> Child:
        """A core process with the arguments of `core_process.main`. Raises OSError: it cannot be started."""
        with self._lock:
            spare = self._spares.pop() if self._spares else None
        if spare is not None:
            try:
                return spare.become_core(words, memory_fd)
            except OSError:  # it was killed
                spare.end()
        return core_process.start(words, memory_fd)

    def refill(self, modules: Iterable[str]) -> None:
        """A core serves, which has imported these modules: have a spare for the next one."""
        with self._lock:
            if self._spares or self._is_closed:
                return
            try:
                self._spares.append(_Spare(name for name in modules if name.partition(".")[0] in IMPORTED))
            except OSError as error:
                logger.warning("There is no spare for the engine core: %s", error)

    def close(self) -> None:
        """End the spare, and keep none from now on."""
        with self._lock:
            self._is_closed = True
        self._end()


class _Spare:
    """One process. Raises OSError: it cannot be started."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            try:
                words = [str(theirs.fileno()), json.dumps(list(modules))]
                self.child = Child(f"{__name__}:main", words, (theirs.fileno(),), kind="core")
            except OSError:
                self._link.close()
                raise

    def become_core(self, words: Sequence[str], memory_fd: int) -> Child:
        """Raises OSError: the process has ended."""
        socket.send_fds(self._link, [json.dumps(list(words)).encode()], [memory_fd])
        self._link.close()
        return self.child

    def end(self) -> None:
        """End the process."""
        self._link.close()
        self.child.end(0.0)
        self.child.close()


def _end_all(spares: "list[_Spare]") -> None:
    while spares:
        spares.pop().end()


def main(arguments: list[str]) -> int:
    """Import, wait, become a core. Arguments: the descriptor of a socket, and the modules. The exit code."""
    arguments, _ = begin_child(arguments)
    set_process_label("core")
    name_process(WARMING)
    link = socket.socket(fileno=int(arguments[0]))
    link.set_inheritable(False)
    for name in json.loads(arguments[1]):
        with contextlib.suppress(Exception):  # the core imports it again where it needs it, and says why it cannot
            importlib.import_module(name)
    name_process(WARM)
    data, descriptors, _, _ = socket.recv_fds(link, _MAX_WORDS, 1)
    link.close()
    if not descriptors:
        return 0  # its owner has ended
    return core_process.serve(json.loads(data), descriptors[0])
