"""Processes of one's own for a measurement: started, awaited until they say that they are ready, ended afterwards."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quire import envs
from quire.errors import EngineError

START_TIMEOUT_S = 900.0
"""After this a process that is not ready is ended."""


@contextmanager
def started(
    module: str, arguments: Sequence[str], mark: str, environment: Mapping[str, str | None] | None = None
) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """A Python module as a process, and the line of its output with `mark` in it. Its input stays open while it is wanted.
    Raises EngineError: it ended before that line came.

    Args:
        environment: variables that differ from this process's; None: the child has no such variable.
    """
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    variables = envs.changed_environment(environment or {})
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=variables)
    too_long = threading.Timer(START_TIMEOUT_S, process.kill)
    too_long.daemon = True
    too_long.start()
    try:
        line = _await_line(process, mark)
        too_long.cancel()
        yield line, process
    finally:
        too_long.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


@contextmanager
def started_server(arguments: Sequence[str], environment: Mapping[str, str | None] | None = None) -> Iterator[str]:
    """The URL of `quire serve` with these arguments and variables. Raises EngineError: it ended before it was ready."""
    words = ["serve", "--port", "0", "--disable-uvicorn-access-log", *arguments]
    with started("quire.entrypoints.cli.main", words, " is ready after ", environment) as (line, _):
        yield line.rsplit(" at ", 1)[1]
