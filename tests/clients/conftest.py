"""Servers as users start them, for the clients that they bring along."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.oracles.server_process import held_port

FLAGS = ("--disable-uvicorn-access-log", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "32")


class Server:
    """A server process; its log goes to a file, so that it never waits for a reader.

    Attributes:
        url: its address, without a path.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._held = contextlib.ExitStack()
        port = self._held.enter_context(held_port())
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", *flags, *FLAGS, "--port", str(port)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.url = f"http://127.0.0.1:{port}"
        self.address = ("127.0.0.1", port)
        self.client = httpx.Client(base_url=self.url, timeout=120)
        while not self._is_ready():
            assert self._process.poll() is None, self.log()
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text()

    def gauges(self) -> dict[str, float]:
        """How many requests run and wait, how full the pages are, and what `/load` says."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        lines = self.client.get("/metrics").text.splitlines()
        told = {name: float(line.split()[-1]) for name in names for line in lines if line.startswith(f"quire:{name}{{")}
        return {**told, "load": self.client.get("/load").json()["server_load"]}

    def close(self) -> None:
        """End it at once."""
        self.client.close()
        self._process.kill()
        self._process.wait(60)
        self._held.close()


def _served(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    yield server
    server.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model; pages of other origins may call it."""
    yield from _served(tmp_path_factory.mktemp("demo"), "--max-model-len", "1024", "--allowed-origins", "*")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny random embedding model."""
    from tests.oracles.tiny_models import make_tiny_model

    path = make_tiny_model("Qwen3Model", tmp_path_factory.mktemp("embedder"))
    yield from _served(
        tmp_path_factory.mktemp("log"), str(path), "--max-model-len", "128", "--served-model-name", "embedder"
    )
