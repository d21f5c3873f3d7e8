"""Child processes: a fresh interpreter with this process's search path, which ends when its parent does; and messages through
pipes, each with its size before it.

Knows nothing of what children do or say.
"""

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence

EXIT_PARENT_DIED = 3
"""The exit code of a child whose parent has died."""

_CHILD = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); module, name = sys.argv[2].split(':'); "
    "sys.exit(getattr(importlib.import_module(module), name)(sys.argv[3:]))"
)
_LENGTH = struct.Struct("=Q")
_CHUNK = 1 << 20


def start_child(
    function: str,
    arguments: Sequence[str] = (),
    *,
    keep: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that calls a function; what it returns is the exit code.

    Args:
        function: `module:name`; it takes the list of arguments.
        keep: descriptors that the child inherits.
        stdin, stdout, stderr, start_new_session: as of `subprocess.Popen`.

    Raises:
        OSError: the process cannot be started.
    """
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    command = [sys.executable, "-c", _CHILD, path, function, *arguments]
    return subprocess.Popen(
        command,
        pass_fds=tuple(keep),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=start_new_session,
    )


def end_with_parent(descriptor: int) -> None:
    """In a child: end this process, in the middle of whatever it does, when the other end of a pipe is closed, which happens
    when the parent dies in any way."""
    threading.Thread(target=_wait_for_parent, args=(descriptor,), name="parent-watch", daemon=True).start()


def _wait_for_parent(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(EXIT_PARENT_DIED)


def write_message(descriptor: int, data: bytes) -> None:
    """Write one message whole. Blocks while the pipe is full.
    Raises BrokenPipeError: the other end is closed."""
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def read_message(descriptor: int) -> bytes | None:
    """Read one message whole, waiting for all of it; None at the end of the stream."""
    length = _read(descriptor, _LENGTH.size)
    return None if length is None else _read(descriptor, _LENGTH.unpack(length)[0])


def _read(descriptor: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, min(_CHUNK, count - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)
