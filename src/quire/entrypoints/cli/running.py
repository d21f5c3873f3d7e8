"""The servers of this user that run on this machine: a file for each, which the server writes when it is ready.

A server that was killed leaves its file; who reads the files removes those whose process is gone. Knows processes and files.
"""

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire import envs
from quire.errors import ConfigError, did_you_mean
from quire.kept_files import write_whole

_LOOK_S = 0.1


class RunningServer(msgspec.Struct):
    """One server.

    Attributes:
        started: the process's start, as the kernel counts it: another process with the same number has another start.
        since: seconds of the epoch at which it was ready.
        model: as the user named it, or the file of several; names: under which it serves them; pools: it cannot talk.
    """

    pid: int
    started: int
    since: float
    url: str
    model: str
    names: list[str]
    has_keys: bool = False
    pools: bool = False
    is_several: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        return self.names[0] if self.names else self.model

    def is_called(self, word: str) -> bool:
        """Whether a word means this server: its model, one of its names, its address, its port or its process."""
        port = self.url.rpartition(":")[2]
        return word.rstrip("/").removesuffix("/v1") in (self.model, *self.names, self.url, port, str(self.pid))


def folder() -> Path:
    """Where the files are."""
    return Path(envs.QUIRE_CACHE_ROOT) / "servers"


def register(
    url: str, model: str, names: list[str], has_keys: bool, pools: bool = False, *, is_several: bool = False
) -> None:
    """Say that this process is a server that is ready; taken back when it ends."""
    pid = os.getpid()
    server = RunningServer(pid, _start_of(pid) or 0, time.time(), url, model, names, has_keys, pools, is_several)
    path = folder() / f"{pid}.json"
    with contextlib.suppress(OSError):  # a home that is only read: the server serves all the same
        write_whole(path, msgspec.json.encode(server))
        atexit.register(_forget, path, pid)


def _forget(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def find_servers() -> list[RunningServer]:
    """Those that run, the latest first. Files of others are removed."""
    found: list[RunningServer] = []
    for path in folder().glob("*.json"):
        try:
            server = msgspec.json.decode(path.read_bytes(), type=RunningServer)
        except (OSError, msgspec.DecodeError):
            continue
        if _start_of(server.pid) == server.started:
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda each: -each.since)


def latest_url() -> str:
    """Where the latest server answers that runs; the usual address where none does."""
    return next((each.url for each in find_servers() if each.url.startswith("http")), "http://127.0.0.1:8000")


def find_server(word: str) -> RunningServer:
    """The server that a word means: one of that model alone before one of several. Raises ConfigError: none does."""
    servers = sorted(find_servers(), key=lambda each: each.is_several)
    found = next((each for each in servers if each.is_called(word)), None)
    if found is None:
        names = [name for each in servers for name in (*each.names, each.url)]
        there = f"there are {', '.join(names)}" if names else "no server of this user runs on this machine"
        raise ConfigError.of("server", f"{word!r} is not running; {did_you_mean(word, names, '{}', there)}")
    return found


def stop(server: RunningServer, tell: Callable[[str], object], patience_s: float = 330.0) -> bool:
    """Ask a server to end, and wait until it has: its running requests finish first. False: it goes on."""
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + patience_s
    told = False
    while _start_of(server.pid) == server.started:
        if time.monotonic() > deadline:
            return False
        if not told and time.monotonic() > deadline - patience_s + 2:
            tell(f"{server.name} finishes its running requests …")
            told = True
        time.sleep(_LOOK_S)
    return True


def _start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None of one that is not there or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
