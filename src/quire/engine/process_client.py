"""The parent's side of an engine core process: starts it, talks to it, notices its death.

Messages go over two Unix sockets (ZMQ, one for each direction) in a folder that only the owner can enter; the folder is
removed as soon as the child is connected. Knows nothing of requests.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from typing import Any

from quire import envs
from quire.config import EngineConfig
from quire.config.wire import config_to_plain
from quire.engine import messages
from quire.engine.model_files import fetch_missing_weights
from quire.errors import ConfigError, EngineDeadError
from quire.logger import init_logger
from quire.processes import start_child

logger = init_logger(__name__)

_PATIENCE_S = 5.0
"""How long an orderly end may take before the child is killed."""

_LAST_WORDS_MS = 200
"""What the child said before it died has left its process by then; this is for the way through our own socket thread."""


class CoreProcessHandle:
    """One child process with its sockets.

    Sends may come from any thread; `receive` belongs to one thread at a time. `ready` is what the core said when it began to
    serve.

    Args:
        executor: class path of the executor, if not the one that the configuration names.

    Raises:
        ConfigError: the configuration cannot be sent, or the core refuses it.
        EngineDeadError: the core died before it was ready, or is not ready in time.
    """

    def __init__(self, config: EngineConfig, executor: str | None = None) -> None:
        import zmq

        if executor is None:
            fetch_missing_weights(config)
        start = messages.Start(config_to_plain(config), executor)
        self._zmq = zmq
        self._encode = messages.frontend_to_core().encode
        self._decode = messages.core_to_frontend().decode
        self._send_lock = threading.Lock()
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="quire-", dir=envs.QUIRE_RPC_BASE_PATH)
        self._context = zmq.Context()
        self._input, input_address = self._bind(zmq.PUSH, "in")
        self._output, output_address = self._bind(zmq.PULL, "out")
        self._process, self._life_fd, parent_fd = self._spawn(input_address, output_address)
        # Also for a handle that is dropped without `close`: the child ends when its pipe does, and a context that were left
        # to the collector would wait for sockets that nobody closes any more.
        self._release = weakref.finalize(
            self, _release, self._context, (self._input, self._output), (parent_fd, self._life_fd)
        )
        self._writable = zmq.Poller()
        self._writable.register(self._input, zmq.POLLOUT)
        self._writable.register(self._life_fd, zmq.POLLIN)
        self._poller = zmq.Poller()
        self._poller.register(self._output, zmq.POLLIN)
        self._poller.register(self._life_fd, zmq.POLLIN)
        try:
            self.send(start)
            self._wait_until_ready()
        except BaseException:
            self.shutdown(patience_s=0.0)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _bind(self, kind: int, name: str) -> tuple[Any, str]:
        address = f"ipc://{self._folder}/{name}"
        return messages.zmq_socket(self._context, kind, address, bind=True), address

    def _spawn(self, input_address: str, output_address: str) -> tuple["subprocess.Popen[bytes]", int, int]:
        """The child, an end of the pipe that closes with it, and an end that closes with this process."""
        parent_read, parent_write = os.pipe()
        life_read, life_write = os.pipe()
        try:
            words = [input_address, output_address, str(parent_read), str(life_write)]
            keep = (parent_read, life_write)
            process = start_child("quire.engine.core_loop:main", words, keep=keep, stdin=subprocess.DEVNULL)
        except OSError:
            os.close(parent_write)
            os.close(life_read)
            raise
        finally:
            os.close(parent_read)
            os.close(life_write)
        return process, life_read, parent_write

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + envs.QUIRE_ENGINE_READY_TIMEOUT_S
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            match message:
                case messages.Ready():
                    self.ready = message
                    return
                case messages.Dead(message=text, is_config_error=True, setting=setting):
                    raise ConfigError(text, setting=setting)
                case messages.Dead(message=text):
                    raise EngineDeadError(f"the engine core could not start: {text}")
                case None:
                    raise EngineDeadError(
                        f"the engine core was not ready within {envs.QUIRE_ENGINE_READY_TIMEOUT_S:.0f} s "
                        "(QUIRE_ENGINE_READY_TIMEOUT_S)"
                    )
                case _:
                    pass

    def send(self, message: messages.FrontendMessage) -> None:
        """Send a message. Waits only for a child that has not connected yet; one that has ended gets no message.
        Raises RequestError: it holds a function."""
        data = self._encode(message)
        with self._send_lock:
            while not self._closed:
                try:
                    self._input.send(data, self._zmq.NOBLOCK)
                    return
                except self._zmq.Again:
                    if self._life_fd in dict(self._writable.poll()):
                        return

    def receive(self, timeout_s: float | None = None) -> messages.CoreMessage | None:
        """The next message; None after `timeout_s`. The child's death is a `Dead`, after everything that it said."""
        if self._closed:
            return messages.Dead("the engine core was shut down")
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._output in ready:
            return self._decode(self._output.recv())
        if self._life_fd in ready:
            if self._output.poll(_LAST_WORDS_MS):
                return self._decode(self._output.recv())
            return messages.Dead(f"the engine core process {self.pid} {_describe_exit(self._process.wait())}")
        return None

    def end_child(self, patience_s: float = _PATIENCE_S) -> None:
        """End the child: in good order if it can within `patience_s`, else by force. From any thread."""
        if self._process.poll() is None:
            if patience_s > 0:
                with contextlib.suppress(self._zmq.ZMQError):
                    self.send(messages.Shutdown())
            try:
                self._process.wait(patience_s if patience_s > 0 else 0.01)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Close sockets and pipes; only when no other thread is in `receive`. May be called twice."""
        with self._send_lock:
            if self._closed:
                return
            self._closed = True
        self._release()

    def shutdown(self, patience_s: float = _PATIENCE_S) -> None:
        """`end_child` and `close`."""
        if not self._closed:
            self.end_child(patience_s)
            self.close()


def _release(context: Any, sockets: tuple[Any, ...], descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def _describe_exit(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
