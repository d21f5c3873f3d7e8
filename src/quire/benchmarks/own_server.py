"""Processes of one's own for a measurement: started, awaited until they are ready, ended afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quire import envs
from quire.entrypoints.http_client import Target, ask
from quire.errors import ConfigError, EngineError, refusing

START_TIMEOUT_S = 900.0
"""After this a process that is not ready is ended."""
STOP_TIMEOUT_S = 60.0
_CHILD = (
    "import runpy, sys; from quire.processes import end_with_parent; end_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[str]", first_signal: signal.Signals) -> Iterator[None]:
    """End a process afterwards: by a signal, and by force with all the processes it started if it does not obey."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(first_signal)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def started(
    module: str, arguments: Sequence[str], mark: str, environment: Mapping[str, str | None] | None = None
) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """A Python module as a process, and the line of its output with `mark` in it. Its input stays open while it is wanted, and it
    ends when this process does, in whatever way.
    Raises EngineError: it ended before that line came.

    Args:
        environment: variables that differ from this process's; None: the child has no such variable.
    """
    read_fd, my_end_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(read_fd), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=envs.changed_environment(environment or {}),
            start_new_session=True,
            pass_fds=(read_fd,),
        )
    finally:
        os.close(read_fd)
    too_long = threading.Timer(START_TIMEOUT_S, process.kill)
    too_long.daemon = True
    too_long.start()
    try:
        with _ended(process, signal.SIGTERM):
            try:
                line = _await_line(process, mark)
            finally:
                too_long.cancel()
            yield line, process
    finally:
        os.close(my_end_fd)


def _await_line(process: "subprocess.Popen[str]", mark: str) -> str:
    """Read the output up to the line; a thread goes on reading, so that the pipe never fills."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return line.strip()
    raise EngineError(f"The server ended with code {process.wait()}: {''.join(lines[-15:]).strip()}")


@contextlib.contextmanager
def started_server(arguments: Sequence[str], environment: Mapping[str, str | None] | None = None) -> Iterator[str]:
    """The URL of `quire serve` with these arguments and variables. Raises EngineError: it ended before it was ready."""
    words = ["serve", "--port", "0", "--disable-uvicorn-access-log", *arguments]
    with started("quire.entrypoints.cli.main", words, " is ready after ", environment) as (line, _):
        yield line.rsplit(" at ", 1)[1]


class RunningServer(NamedTuple):
    """A server that some command started.

    Attributes:
        log: the file that has what it prints.
    """

    process: "subprocess.Popen[str]"
    target: Target
    log: str

    def is_alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def running_server(words: Sequence[str], log: str, timeout_s: float) -> Iterator[RunningServer]:
    """Any server, started by a command that may name its address with --host and --port; it is ready when /health answers.
    Raises EngineError: it ended, or is not ready in time.
    Raises ConfigError: there is no such command, or something else listens at its address."""
    host = _value(words, "--host") or "127.0.0.1"
    target = Target("127.0.0.1" if host in ("0.0.0.0", "::") else host, int(_value(words, "--port") or 8000))
    if is_healthy(target):
        raise ConfigError.of("serve_cmd", f"something answers at {target.url} already; end it, or give --port.")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    what = f"serve_cmd: cannot run {words[0]!r}"
    with open(log, "w", encoding="utf-8") as output, refusing(OSError, setting="serve_cmd", what=what):
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    server = RunningServer(process, target, log)
    last = time.monotonic() + timeout_s
    with _ended(process, signal.SIGINT):  # which ends a server at once, and with its children
        while not is_healthy(target):
            if not server.is_alive():
                raise EngineError(f"the server ended with code {process.returncode}; see {log}.")
            if time.monotonic() > last:
                raise EngineError(f"the server was not ready after {timeout_s:.0f} s; see {log}.")
            time.sleep(0.2)
        yield server


def is_healthy(target: Target) -> bool:
    """Whether `/health` says 200."""
    with contextlib.suppress(OSError, EngineError):
        return ask(target, "GET", "/health")[0] == 200
    return False


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag in a command: `--port 8000` or `--port=8000`."""
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag and following is not None:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value
