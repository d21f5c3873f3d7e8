"""A server that a sweep starts: any command that listens on `--host` and `--port` and answers `/health`."""

import contextlib
import os
import signal
import subprocess
import time

from quire.benchmarks.http_load import Target, ask
from quire.errors import ConfigError, EngineError

STOP_TIMEOUT_S = 60.0


class SweepServer:
    """A running server; a context that ends it with all the processes it started.

    Args:
        words: the command.
        log: the file for what it prints.
        timeout_s: how long it may take until it is ready.

    Raises:
        EngineError: it ended, or is not ready in time.
        ConfigError: there is no such command, or something else listens at its address.
    """

    def __init__(self, words: list[str], log: str, timeout_s: float) -> None:
        self._words = words
        self.log = log
        self._timeout_s = timeout_s
        host = _value(words, "--host") or "127.0.0.1"
        self.target = Target("127.0.0.1" if host in ("0.0.0.0", "::") else host, int(_value(words, "--port") or 8000))

    def __enter__(self) -> "SweepServer":
        if self._answers():
            message = f"something answers at {self.target.url} already; end it, or give --port."
            raise ConfigError.of("serve_cmd", message)
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        with open(self.log, "w", encoding="utf-8") as output:
            try:
                self._process = subprocess.Popen(
                    self._words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise ConfigError.of("serve_cmd", f"cannot run {self._words[0]!r}: {error}.") from None
        last = time.monotonic() + self._timeout_s
        try:
            while not self._answers():
                if not self.is_alive():
                    raise EngineError(f"the server ended with code {self._process.returncode}; see {self.log}.")
                if time.monotonic() > last:
                    raise EngineError(f"the server was not ready after {self._timeout_s:.0f} s; see {self.log}.")
                time.sleep(0.2)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def reset_prefix_cache(self) -> None:
        """Forget what the last benchmark left, as far as the server has a route for it."""
        with contextlib.suppress(OSError, EngineError):
            ask(self.target, "POST", "/reset_prefix_cache")

    def _answers(self) -> bool:
        try:
            return ask(self.target, "GET", "/health")[0] == 200
        except (OSError, EngineError):
            return False

    def _stop(self) -> None:
        if self.is_alive():
            self._process.send_signal(signal.SIGINT)  # at once, and with its children
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _value(words: list[str], flag: str) -> str | None:
    """A flag's last value."""
    value = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value
