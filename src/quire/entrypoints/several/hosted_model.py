"""One model of several: the server process that it lives in, started, put to sleep, woken and ended.

Knows the process, and the routes by which a server sleeps. Knows nothing of other models.
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire import envs
from quire.config.hub.download import amount
from quire.entrypoints.http.backend_link import BackendGone, ask_within, exchange
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http_client import Target
from quire.entrypoints.several.models_file import ModelEntry, flag_words, read_bytes
from quire.errors import EngineError
from quire.logger import init_logger
from quire.processes import start_child

logger = init_logger(__name__)

_LOOK_S = 0.1
_CONTEXT_BYTES = 512 << 20
"""What a sleeping process keeps of a card: its context. An estimate."""
_LONGEST_PAUSE_S = 60.0
_END_TIMEOUT_S = 30.0


class ModelDown(HTTPError):
    """A model cannot be had now; the others can."""

    def __init__(self, message: str, retry_after: float) -> None:
        headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
        super().__init__(503, message, param="model", code="model_unavailable", headers=headers)


class Measured(msgspec.Struct):
    """What `quire explain` says of a model's memory, in bytes, and how long its context is."""

    awake: int
    asleep: int
    total: int
    max_model_len: int
    words: list[str] = []


class HostedModel:
    """A model and its process.

    Args:
        words: flags of `quire serve` that all models have.
        socket: where its server listens.
        life_fd: it ends when the other end of this pipe is closed.
        key: with which its server is asked; those of clients pass through.

    Attributes:
        state: `moving` while it is being started or woken.
        waking: what sees to it, for all requests that wait for it.
        users: requests that it is answering.
        idle: there are none.
        is_leaving: it is going to sleep, and takes no more requests.
        problem: why it could not be had the last time.
    """

    def __init__(
        self, entry: ModelEntry, words: Sequence[str], socket: str, life_fd: int, key: str | None = None
    ) -> None:
        self.entry = entry
        self.target = Target("localhost", 0, uds=socket)
        self.state: Literal["off", "asleep", "awake", "moving"] = "off"
        self.waking: asyncio.Task[None] | None = None
        self.users = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_leaving = False
        self.last_used = 0.0
        self.num_requests = self.num_wakes = self.num_starts = 0
        self.wake_seconds = 0.0
        self.problem = ""
        self.measured: Measured | None = None
        self._words = [entry.model, *words, *flag_words(entry.flags), "--served-model-name", *entry.names]
        self._life_fd = life_fd
        self._headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._not_before = 0.0

    @property
    def name(self) -> str:
        return self.entry.names[0]

    def check(self) -> None:
        """Notice a process that has ended by itself. Raises ModelDown while it is too early to try again."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._fail(f"its process ended with code {code}")
        if self.state == "off" and (wait := self._not_before - time.monotonic()) > 0:
            raise ModelDown(f"{self.name!r} cannot be had: {self.problem}.", wait)

    async def measure(self) -> Measured:
        """What it is going to take, found once. Raises ModelDown: its flags are wrong, or it is not there."""
        if self.measured is None:
            command = (sys.executable, "-m", "quire.entrypoints.cli.main", "explain", "--json", *self._words)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            told, errors = await process.communicate()
            if process.returncode:
                lines = [line for line in errors.decode("utf-8", "replace").splitlines() if "error: " in line]
                why = " ".join(line.partition("error: ")[2] for line in lines) or f"code {process.returncode}"
                raise self._fail(why)
            try:
                self.measured = _read_report(json.loads(told), read_bytes(self.entry.memory, "memory"), self._words)
            except EngineError as error:
                raise self._fail(str(error)) from None
        return self.measured

    async def wake(self) -> None:
        """Have it answer requests; where it has no process, start one. Raises ModelDown."""
        began, was_off = time.monotonic(), self._process is None
        try:
            await (self._start() if was_off else self._tell("/wake_up"))
        except BackendGone as error:
            raise self._fail(str(error)) from None
        self.state, self.problem, self._failures = "awake", "", 0
        self.wake_seconds = time.monotonic() - began
        self.num_starts, self.num_wakes = self.num_starts + was_off, self.num_wakes + (not was_off)
        logger.info("%s is %s after %.2f s.", self.name, "there" if was_off else "awake", self.wake_seconds)

    async def sleep(self) -> None:
        """Have it give its memory back; one that cannot ends."""
        try:
            await self._tell("/sleep?level=1&mode=wait")
            self.state = "asleep"
            logger.info("%s sleeps.", self.name)
        except BackendGone as error:
            logger.error("%s does not go to sleep, and ends: %s", self.name, error)
            await self.stop()

    async def stop(self) -> None:
        """End its process; running requests finish first, within limits."""
        process, self._process = self._process, None
        self.state = "off"
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), _END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
        logger.info("%s has ended.", self.name)

    async def ask(self, path: str) -> bytes | None:
        """What its server answers to a GET; None if it has none, or does not answer."""
        if self.state not in ("awake", "asleep"):
            return None
        return await ask_within(5, self.target, "GET", path, self._headers)

    def describe(self) -> dict[str, Any]:
        """How it stands, for `/models`."""
        return {
            "name": self.name,
            "names": list(self.entry.names),
            "model": self.entry.model,
            "state": self.state,
            "requests": self.num_requests,
            "running": self.users,
            "starts": self.num_starts,
            "wakes": self.num_wakes,
            "last_wake_seconds": round(self.wake_seconds, 3),
            "memory_awake": None if self.measured is None else self.measured.awake,
            "memory_asleep": None if self.measured is None else self.measured.asleep,
            "problem": self.problem or None,
        }

    async def _start(self) -> None:
        """Start its process; returns when it is ready. Raises ModelDown: it ended before."""
        measured = await self.measure()
        path = self.target.uds
        words = [*self._words, *measured.words, "--uds", path]
        self._process = start_child(
            "quire.entrypoints.several.model_process:main",
            (str(self._life_fd), self.name, *words),
            kind="frontend",
            keep=(self._life_fd,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            environment=envs.changed_environment({"QUIRE_SERVER_DEV_MODE": "1"}),
        )
        while self._process.poll() is None:
            if os.path.exists(path) and await ask_within(5, self.target, "GET", "/ready", self._headers) is not None:
                return
            await asyncio.sleep(_LOOK_S)
        raise self._fail(
            f"its process ended with code {self._process.returncode} before it was ready; the log says why"
        )

    async def _tell(self, path: str) -> None:
        async with exchange(self.target, "POST", path, self._headers, b"") as answer:
            body = await answer.whole()
            if answer.status != 200:
                raise BackendGone(f"{path} is answered with {answer.status}: {body[:200].decode('utf-8', 'replace')}")

    def _fail(self, why: str) -> ModelDown:
        """It is not there; tried again at once, then after pauses that double."""
        pause = min(_LONGEST_PAUSE_S, 2.0**self._failures) if self._failures else 0.0
        self._failures += 1
        self.state, self._process, self.problem = "off", None, why.rstrip(".")
        self._not_before = time.monotonic() + pause
        logger.error("%s: %s.", self.name, self.problem)
        return ModelDown(f"{self.name!r} cannot be had: {self.problem}.", pause)


def _read_report(report: Mapping[str, Any], given: int | None, words: Sequence[str]) -> Measured:
    """What a model takes, by its report; `given` is what its operator says, which becomes a flag."""
    memory, capabilities = report["memory"], report["platform"]["capabilities"]
    if refused := memory.get("refused"):
        raise EngineError(str(refused))
    weights, workspace, total = memory["weights"], memory.get("workspace", 0), memory["total"]
    on_host = bool(_plain(capabilities["computes_on_host"]))
    limit = int(_plain(report["config"]["model"]["max_model_len"]))
    asleep = weights + workspace if on_host else _CONTEXT_BYTES
    awake, added = weights + workspace + memory["available_for_kv_cache"], list[str]()
    if given is not None:
        awake = given
        if given <= weights + workspace:
            raise EngineError(f"memory: {amount(given)} is not more than its weights, {amount(weights)}")
        flag = "--kv-cache-memory-bytes" if on_host else "--gpu-memory-utilization"
        if not any(word.split("=")[0].replace("_", "-") == flag for word in words):
            added = [flag, str(given - weights - workspace) if on_host else f"{given / total:.4f}"]
    return Measured(awake, asleep, total, limit, added)


def _plain(entry: Any) -> Any:
    return entry["value"] if isinstance(entry, dict) else entry
