"""A server in a process of its own, whose output is always read: one that nobody reads stops a server that writes much."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
READY = " is ready after "
SERVE = ("-m", "quire.entrypoints.cli.main", "serve")


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port for a server that must be told one: no other program gets it meanwhile. Servers can listen on it (SO_REUSEADDR)."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class ServerProcess:
    """A server, once it is ready.

    Args:
        arguments: Python's.
        ready: is in the line that has the server's address at its end.

    Attributes:
        lines: what it has printed so far.
        url: its address.
        client: asks it.
    """

    def __init__(self, *arguments: str, ready: str = READY) -> None:
        command = [sys.executable, *arguments]
        self.popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self.line_with(ready, 120).rsplit(" at ", 1)[1].split('"')[0].strip()
        except BaseException:
            self.popen.kill()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self.lines.extend(iter(self.popen.stdout.readline, ""))

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self.lines)

    def children(self, function: str) -> list[int]:
        """Its child processes that run a function of a module: `core_process` or `frontend_child`."""
        found: list[int] = []
        for task in Path(f"/proc/{self.popen.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread or a child that ends meanwhile
                pids = (task / "children").read_text().split()
                found += [int(pid) for pid in pids if function in Path(f"/proc/{pid}/cmdline").read_text()]
        return found

    def line_with(self, text: str, seconds: float = 60) -> str:
        """The first line with this text; waits for it. An AssertionError tells what there is instead."""
        deadline = time.monotonic() + seconds
        while self._reader.is_alive() and time.monotonic() < deadline and text not in self.output:
            time.sleep(0.02)
        found = [line for line in self.lines if text in line]
        assert found, f"no line with {text!r}:\n{self.output}"
        return found[0]

    def end(self, number: signal.Signals | None = None, seconds: float = 60) -> tuple[int, str]:
        """Its exit code and all that it printed, once it has ended; a signal tells it to."""
        if number is not None:
            self.popen.send_signal(number)
        self.client.close()
        code = self.popen.wait(seconds)
        self._reader.join(seconds)
        return code, self.output

    def kill(self) -> tuple[int, str]:
        """End it at once."""
        return self.end(signal.SIGKILL)
