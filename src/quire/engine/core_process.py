"""An engine core as a process of its own: the child's side of `ProcessClient`.

The first message is the configuration. The parent says `Shutdown`, or dies.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from quire import faults
from quire.codec import encode
from quire.config.wire import config_from_plain
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, last_words
from quire.engine.heartbeat import Heartbeat, map_words
from quire.errors import EngineError
from quire.executor.interface import Executor
from quire.logger import set_process_label, trace_this_thread_if_asked
from quire.patch import check_same, settle
from quire.plugins import load_general_plugins
from quire.plugins.registry import import_class
from quire.processes import Child, begin_child, name_process, settle_collector

EXIT_FAILED = 1
_LINGER_MS = 2000
"""How long what was said may take to leave an ending process."""


class SocketInbox:
    """Messages from the socket."""

    def __init__(self, socket: Any) -> None:
        import zmq

        self._zmq = zmq
        self._socket = socket
        self._decode = messages.decoder_at_core()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._interrupt_fd, self._interrupt_write_fd = os.pipe()
        self._poller.register(self._interrupt_fd, zmq.POLLIN)

    def interrupt(self) -> None:
        """Have a waiting `receive` return, with nothing; from any thread."""
        os.write(self._interrupt_write_fd, b"!")

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        """Every message that has come; with `block`, waits for the first."""
        taken: list[messages.FrontendMessage] = []
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


def start_core(inbox: SocketInbox) -> EngineCore | None:
    """The core that the first message asks for; None when it says to end instead."""
    came: list[messages.FrontendMessage] = []
    while not came:
        came = inbox.receive(block=True)
    first = came[0]
    if isinstance(first, messages.Shutdown):
        return None
    if not isinstance(first, messages.Start):
        raise EngineError(f"the first message to an engine core must be messages.Start, not {type(first).__name__}")
    config = config_from_plain(first.config)
    trace_this_thread_if_asked(config.instance_id)
    load_general_plugins("core")
    settle(config)
    check_same(first.patches, "the process that starts this core")
    executor: Executor | None = None
    if first.executor is not None:
        executor = import_class(first.executor, "executor")(config)
    standing = first.standing
    weights = None if standing is None else standing.weights
    core = EngineCore(config, executor, serves=True, weights=weights, is_awaited=standing is not None)
    if standing is not None:
        core.restore(standing)
    settle_collector()
    return core


def start(addresses: Sequence[str], memory_fd: int) -> Child:
    """A process that runs a core: see `serve`. Raises OSError: it cannot be started."""
    return Child(f"{__name__}:main", [*addresses, str(memory_fd)], (memory_fd,), kind="core")


def main(arguments: list[str]) -> int:
    """The child's side of `start`."""
    arguments, _ = begin_child(arguments)
    return serve(arguments[:2], int(arguments[2]))


def serve(addresses: Sequence[str], memory_fd: int) -> int:
    """Connect to the parent's two sockets, start the core, run it; the exit code. The descriptor is that of the heartbeat's
    memory."""
    import zmq

    set_process_label("core")
    name_process("quire core")
    words = map_words(memory_fd)
    os.close(memory_fd)
    faults.begin_process("core")
    context = zmq.Context()
    inbox = SocketInbox(messages.zmq_socket(context, zmq.PULL, addresses[0], bind=False, linger_ms=_LINGER_MS))
    output = messages.zmq_socket(context, zmq.PUSH, addresses[1], bind=False, linger_ms=_LINGER_MS)
    core: EngineCore | None = None

    def send(message: messages.CoreMessage) -> None:
        output.send(encode(message))

    try:
        core = start_core(inbox)
        if core is not None:
            core.heartbeat = Heartbeat(words)
            ready = core.ready()
            if core.config.parallel.spare_core is not False:
                ready.modules = list(sys.modules)
            send(ready)
            CoreLoop(core, inbox, send).run()
    except BaseException as error:
        send(last_words(error))
        return EXIT_FAILED
    finally:
        if core is not None:
            core.shutdown()
        context.destroy(linger=_LINGER_MS)
    return 0
