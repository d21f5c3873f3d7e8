"""A server of one's own for a measurement: started on a free port, ended afterwards."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.errors import EngineError

START_TIMEOUT_S = 900.0
"""After this a server that is not ready is ended."""


@contextmanager
def started_server(arguments: Sequence[str]) -> Iterator[str]:
    """The URL of `quire serve` with these arguments.

    Raises:
        EngineError: it ended before it was ready.
    """
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--port", "0"]
    command += ["--disable-uvicorn-access-log", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    too_long = threading.Timer(START_TIMEOUT_S, process.kill)
    too_long.daemon = True
    too_long.start()
    try:
        url = _await_ready(process)
        too_long.cancel()
        yield url
    finally:
        too_long.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: "subprocess.Popen[str]") -> str:
    """Read the server's output until it says where it is; a thread goes on reading, so that the pipe never fills."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if " is ready after " in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return line.rsplit(" at ", 1)[1].strip()
    raise EngineError(f"The server ended with code {process.wait()}: {''.join(lines[-15:]).strip()}")
