"""An engine core as a process of its own: the child's side.

The parent starts it with two pipes and the addresses of two Unix sockets (`process_client.py`). The pipes carry nothing: each
end closes when its holder dies, however it dies, so that neither side outlives or waits for the other. The first message is
the configuration. SIGINT and SIGTERM are the parent's to handle: a terminal and a service manager send them to the whole
group, and a core that ended with them would leave its parent nothing to drain. The parent says `Shutdown`, or dies.
"""

import gc
import os
import signal
import threading
from typing import Any

from quire.config.wire import config_from_plain
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, describe_death
from quire.engine.messages import (
    CoreMessage,
    FrontendMessage,
    Ready,
    Shutdown,
    Start,
    core_to_frontend,
    frontend_to_core,
)
from quire.engine.process_client import zmq_socket
from quire.errors import EngineError, QuireError
from quire.executor.interface import Executor
from quire.executor.selector import import_class
from quire.logger import init_logger, set_process_label, trace_this_thread_if_asked
from quire.plugins import load_general_plugins

logger = init_logger(__name__)

EXIT_FAILED = 1
EXIT_PARENT_DIED = 3

_COLLECT_AFTER = (50_000, 20, 50)
"""When Python's collector runs: a collection visits every token id of every new prompt, so that they shall be few."""


class SocketInbox:
    """Messages from the socket."""

    def __init__(self, socket: Any) -> None:
        import zmq

        self._zmq = zmq
        self._socket = socket
        self._decode = frontend_to_core().decode
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._interrupt_fd, self._interrupt_write_fd = os.pipe()
        self._poller.register(self._interrupt_fd, zmq.POLLIN)

    def interrupt(self) -> None:
        os.write(self._interrupt_write_fd, b"!")

    def receive(self, block: bool) -> list[FrontendMessage]:
        taken: list[FrontendMessage] = []
        ready = dict(self._poller.poll(None if block else 0))
        if self._interrupt_fd in ready:
            os.read(self._interrupt_fd, 1)
        if self._socket in ready:
            while True:
                try:
                    taken.append(self._decode(self._socket.recv(self._zmq.NOBLOCK)))
                except self._zmq.Again:
                    break
        return taken


class CoreProcess:
    """Connects, starts the core, runs it until it shall end.

    Args:
        input_address, output_address: Unix sockets that the parent has bound.
        parent_fd: readable (closed) when the parent has died.
        life_fd: held open as long as this process lives.
    """

    def __init__(self, input_address: str, output_address: str, parent_fd: int, life_fd: int) -> None:
        import zmq

        os.set_inheritable(parent_fd, False)
        os.set_inheritable(life_fd, False)
        threading.Thread(target=_end_with_parent, args=(parent_fd,), name="parent-watch", daemon=True).start()
        self._context = zmq.Context()
        self._input = zmq_socket(self._context, zmq.PULL, input_address, bind=False, linger_ms=2000)
        self._output = zmq_socket(self._context, zmq.PUSH, output_address, bind=False, linger_ms=2000)
        self._inbox = SocketInbox(self._input)
        self._encode = core_to_frontend().encode

    def run(self) -> int:
        """The process's exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        core: EngineCore | None = None
        try:
            core = self._start()
            if core is not None:
                CoreLoop(core, self._inbox, self._send).run()
        except BaseException as error:
            if isinstance(error, QuireError):
                logger.error("the engine core ends: %s", error)
            else:
                logger.exception("the engine core ends")
            self._send(describe_death(error))
            return EXIT_FAILED
        finally:
            if core is not None:
                core.shutdown()
            self._context.destroy(linger=2000)
        return 0

    def _start(self) -> EngineCore | None:
        """The core that the first message asks for; None when it is told to end instead."""
        messages: list[FrontendMessage] = []
        while not messages:
            messages = self._inbox.receive(block=True)
        first = messages[0]
        if isinstance(first, Shutdown):
            return None
        if not isinstance(first, Start):
            raise EngineError(f"the first message to an engine core must be Start, not {type(first).__name__}")
        config = config_from_plain(first.config)
        trace_this_thread_if_asked(config.instance_id)
        load_general_plugins("core")
        executor: Executor | None = None
        if first.executor is not None:
            executor = import_class(first.executor, "executor")(config)
        core = EngineCore(config, executor)
        gc.collect()
        gc.freeze()  # what was loaded stays: later collections need not look at it
        gc.set_threshold(*_COLLECT_AFTER)
        cache = core.kv_cache
        self._send(Ready({"num_kv_blocks": cache.num_blocks, "kv_block_size": cache.block_size, "pid": os.getpid()}))
        return core

    def _send(self, message: CoreMessage) -> None:
        self._output.send(self._encode(message))


def _end_with_parent(parent_fd: int) -> None:
    """Blocks until the parent has died, in whatever way; then this process ends too, in the middle of a step if need be."""
    while os.read(parent_fd, 1):
        pass
    os._exit(EXIT_PARENT_DIED)


def main(arguments: list[str]) -> int:
    set_process_label("core")
    input_address, output_address, parent_fd, life_fd = arguments
    return CoreProcess(input_address, output_address, int(parent_fd), int(life_fd)).run()
