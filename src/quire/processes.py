"""Child processes: a fresh interpreter with this process's search path, which ends when its parent does, shows its stacks when
asked, and can be killed with its own children; and messages through pipes, each with its size before it.

Knows nothing of what children do or say.
"""

import contextlib
import faulthandler
import fcntl
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

EXIT_PARENT_DIED = 3
"""The exit code of a child whose parent has died, where the kernel does not kill it."""

_CHILD = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); call = lambda path, *arguments: "
    "getattr(importlib.import_module(path.split(':')[0]), path.split(':')[1])(*arguments); "
    "sys.argv[2] and call('quire.patch:bootstrap', sys.argv[2]); sys.exit(call(sys.argv[3], sys.argv[4:]))"
)
STACKS_SIGNAL = signal.SIGUSR1
"""A child that gets it writes the stacks of its threads to its standard error, whatever its threads wait for."""

_COLLECT_AFTER = (50_000, 20, 50)
"""When Python's collector runs: a collection visits every token id of every new prompt, so that they shall be few."""
_SWITCH_S = 0.2e-3
"""How long a thread that works beside others may keep the interpreter from them."""
_PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_STDERR = 2
_LENGTH = struct.Struct("=Q")
_CHUNK = 1 << 20


def start_child(
    function: str,
    arguments: Sequence[str] = (),
    *,
    kind: str = "",
    keep: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that calls a function; what it returns is the exit code.

    Args:
        function: `module:name`; it takes the list of arguments.
        kind: `frontend`, `core`, `worker` or `inspector`: patches for it are there before `function` is imported. Empty: a
            helper, which has none.
        keep: descriptors that the child inherits.
        stdin, stdout, stderr, start_new_session: as of `subprocess.Popen`.
        environment: all of its variables; None: this process's.

    Raises:
        OSError: the process cannot be started.
    """
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    command = [sys.executable, "-c", _CHILD, path, kind, function, *arguments]
    return subprocess.Popen(
        command,
        pass_fds=tuple(keep),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=start_new_session,
        env=environment,
    )


class Child:
    """A fresh interpreter that ends when this process ends, and whose end this process notices, however either ends.

    Each of them holds one end of two pipes; an end closes when its holder dies. SIGINT and SIGTERM are this process's to handle:
    a terminal and a service manager send them to the whole group, and a child that ended with them would leave its parent
    nothing to drain.

    Args:
        function: `module:name`; it takes a list of arguments and calls `begin_child` first.
        keep: descriptors that the child inherits.
        kind: of process, as of `start_child`.
        environment: all of its variables; None: this process's.

    Attributes:
        life_fd: readable when the child has written last words, and when it has ended.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[str] = (),
        keep: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        *,
        kind: str = "",
    ) -> None:
        parent_read, self._parent_fd = os.pipe()
        self.life_fd, life_write = os.pipe()
        inherited = (parent_read, life_write)
        words = [*map(str, inherited), *arguments]
        # The child begins with both signals blocked, so that none can end it before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            self.process = start_child(
                function, words, kind=kind, keep=(*keep, *inherited), stdin=subprocess.DEVNULL, environment=environment
            )
        except OSError:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for descriptor in inherited:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, patience_s: float) -> None:
        """Wait until the child has ended; kill it, and all its children, after `patience_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.01, patience_s))
        if self.process.poll() is None:
            self.kill()
            self.process.wait()

    def kill(self) -> None:
        """Kill it and all its children and theirs, which may be stopped and then would not notice its death."""
        others = [other.pid for other in family(self.pid)[1:]] if self.process.poll() is None else []
        self.process.kill()
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def describe_exit(self) -> str:
        """How it ended; waits for that."""
        code = self.process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def close(self) -> None:
        """Close this process's ends of the pipes; a child that still lives ends by that."""
        os.close(self.life_fd)
        os.close(self._parent_fd)


def begin_child(arguments: list[str]) -> tuple[list[str], int]:
    """The first call in a `Child`. Returns the function's own arguments, and the descriptor for last words."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # the parent blocked them until here
    parent_fd, life_fd = map(int, arguments[:2])
    for descriptor in (parent_fd, life_fd):
        os.set_inheritable(descriptor, False)
    end_with_parent(parent_fd)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    return arguments[2:], life_fd


def end_with_parent(descriptor: int, last: Callable[[], None] | None = None) -> None:
    """In a child: end this process, in the middle of whatever it does, when the other end of a pipe is closed, which happens
    when the parent dies in any way. `last`: called before, in a thread; it clears up after the parent."""
    threading.Thread(target=_wait_for_parent, args=(descriptor, last), name="parent-watch", daemon=True).start()
    # The thread cannot run while the process is stopped, nor while a library that waits for other ranks keeps the interpreter
    # to itself. The kernel's signal reaches both.
    with contextlib.suppress(OSError):
        _ask_for_signal(descriptor, signal.SIGKILL if last is None else signal.SIGCONT)


def _ask_for_signal(descriptor: int, number: signal.Signals) -> None:
    """Get a signal from the kernel when the other end of a pipe is closed. Only Linux has this."""
    if sys.platform == "linux":
        # Opened anew, and never closed: processes that share the pipe have one signal each.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(own, fcntl.F_SETSIG, number)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def _wait_for_parent(descriptor: int, last: Callable[[], None] | None) -> None:
    while os.read(descriptor, 1):
        pass
    try:
        if last is not None:
            last()
    finally:
        os._exit(EXIT_PARENT_DIED)


class ProcessState(NamedTuple):
    """A process as the system sees it.

    Attributes:
        name: what `name_process` called it.
        state: the letter of `ps`: R runs, S waits, T is stopped …
        waits_in: the kernel's function, where it is told.
    """

    pid: int
    parent: int
    name: str
    state: str
    waits_in: str

    @property
    def can_show_stacks(self) -> bool:
        """Whether it would hear a signal."""
        return self.state not in "TtZ"

    def __str__(self) -> str:
        words = {"R": "runs", "S": "waits", "D": "waits for a device and cannot be interrupted"}
        words |= {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended"}
        where = f" in {self.waits_in}" if self.waits_in else ""
        return f"{self.name} (process {self.pid}) {words.get(self.state, f'is in state {self.state}')}{where}"


@contextlib.contextmanager
def yielding() -> Generator[None]:
    """Other threads need not wait for the interpreter while this one works."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def settle_collector() -> None:
    """Everything is loaded, and stays: later collections need not look at it, and shall be few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def name_process(name: str) -> None:
    """Call this process so in `ps` and `top`: up to 15 characters. Systems without `/proc` pass over it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def family(pid: int) -> list[ProcessState]:
    """A process and all its children and theirs, parents first; itself alone where there is no `/proc`."""
    states = [state for folder in Path("/proc").glob("[0-9]*") if (state := _read_state(folder)) is not None]
    found = [state for state in states if state.pid == pid] or [ProcessState(pid, 0, "core", "", "")]
    for parent in found:  # which grows
        found += [state for state in states if state.parent == parent.pid]
    return found


def _read_state(folder: Path) -> ProcessState | None:
    try:
        head, _, tail = (folder / "stat").read_text().rpartition(")")
        waits_in = (folder / "wchan").read_text()
    except OSError:  # it has ended meanwhile, or is somebody else's
        return None
    state, parent = tail.split()[:2]
    return ProcessState(int(folder.name), int(parent), head.partition("(")[2], state, waits_in.strip("0"))


def write_message(descriptor: int, data: bytes) -> None:
    """Write one message whole. Blocks while the pipe is full.
    Raises BrokenPipeError: the other end is closed."""
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def read_message(descriptor: int, most: int | None = None) -> bytes | None:
    """Read one message whole, waiting for all of it; None at the end of the stream.

    Args:
        most: bytes that a message from another host may have.

    Raises:
        ConnectionError: it has more.
    """
    head = _read(descriptor, _LENGTH.size)
    if head is None:
        return None
    length = _LENGTH.unpack(head)[0]
    if most is not None and length > most:
        raise ConnectionError(f"a message of {length} bytes is announced; {most} are the most")
    return _read(descriptor, length)


def _read(descriptor: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, min(_CHUNK, count - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)
