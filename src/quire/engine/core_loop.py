"""The loop that an engine core runs in a thread or a process of its own: messages in, steps, messages out.

When there is nothing to do the executor may prepare for later work, in short calls between which the inbox is looked into.
When that is done too, the loop waits in the inbox, which blocks on a lock or a file descriptor and uses no CPU.

The second half is an engine core as a process of its own. The parent starts it with two pipes and the addresses of two Unix
sockets (`process_client.py`). The pipes carry nothing: each end closes when its holder dies, however it dies, so that neither
side outlives or waits for the other. The first message is the configuration. SIGINT and SIGTERM are the parent's to handle: a
terminal and a service manager send them to the whole group, and a core that ended with them would leave its parent nothing to
drain. The parent says `Shutdown`, or dies.
"""

import collections
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol

from quire.config.wire import config_from_plain
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.errors import ConfigError, EngineError, QuireError
from quire.executor.interface import Executor
from quire.executor.selector import import_class
from quire.logger import init_logger, set_process_label, trace_this_thread_if_asked
from quire.plugins import load_general_plugins
from quire.processes import end_with_parent
from quire.request import EngineCoreOutputs

logger = init_logger(__name__)


class Inbox(Protocol):
    """Where a core's messages come from."""

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        """Every message that has come; with `block`, waits for the first."""
        ...

    def interrupt(self) -> None:
        """Have a waiting `receive` return, with nothing; from any thread."""
        ...


class ThreadInbox:
    """Messages from other threads of this process, as objects."""

    def __init__(self) -> None:
        self._messages: collections.deque[messages.FrontendMessage] = collections.deque()
        self._arrived = threading.Event()

    def put(self, message: messages.FrontendMessage) -> None:
        """Hand over a message; from any thread."""
        self._messages.append(message)
        self._arrived.set()

    def interrupt(self) -> None:
        self._arrived.set()

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        if block:
            self._arrived.wait()
        if not self._arrived.is_set():
            return []
        self._arrived.clear()  # before taking: what is put from here on sets it again
        taken: list[messages.FrontendMessage] = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken


def call_utility(core: EngineCore, utility: messages.Utility, args: list[Any]) -> Any:
    """One utility's value: of the core's method that is called so. Nothing else of the core can be called from outside."""
    return getattr(core, utility.value)(*args)


def describe_death(error: BaseException) -> messages.Dead:
    """Last words about an error."""
    is_config_error = isinstance(error, ConfigError)
    message = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    return messages.Dead(message, is_config_error, error.setting if isinstance(error, ConfigError) else None)


class CoreLoop:
    """Drives a core until a `messages.Shutdown` comes or a step fails.

    Args:
        inbox: where messages come from.
        send: where answers go.
    """

    def __init__(self, core: EngineCore, inbox: Inbox, send: Callable[[messages.CoreMessage], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send

    def run(self) -> None:
        """Returns after a `messages.Shutdown`; raises what a step raised."""
        core, inbox = self._core, self._inbox
        core.on_failure(inbox.interrupt)
        could_prepare = True
        while True:
            for message in inbox.receive(block=not could_prepare and not core.has_work()):
                if isinstance(message, messages.Shutdown):
                    return
                self._handle(message)
            if not core.has_work():  # also after an interruption: `idle` says what was wrong
                could_prepare = core.idle()
            else:
                could_prepare = True
                outputs = core.step()
                if _has_content(outputs):
                    self._send(messages.Outputs(outputs))

    def _handle(self, message: messages.FrontendMessage) -> None:
        match message:
            case messages.AddRequests(requests=requests):
                self._core.add_requests(requests)
            case messages.AbortRequests(request_ids=request_ids):
                self._core.abort_requests(request_ids)
            case messages.UtilityCall(call_id=call_id, utility=utility, args=args):
                answer = self._answer(call_id, utility, args)
                if _has_content(news := self._core.take_news()):  # what it led to comes first
                    self._send(messages.Outputs(news))
                self._send(answer)
            case messages.Start() | messages.Shutdown():
                logger.warning("a running engine core got a %s message", type(message).__name__)

    def _answer(self, call_id: int, utility: messages.Utility, args: list[Any]) -> messages.UtilityResult:
        try:
            return messages.UtilityResult(call_id, call_utility(self._core, utility, args))
        except Exception as error:  # the caller's to know; the engine goes on
            if (refusal := messages.refusal_of(error)) is not None:
                return messages.UtilityResult(call_id, error=str(error), refusal=refusal)
            message = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            return messages.UtilityResult(call_id, error=f"{utility.value}: {message}")


def _has_content(outputs: EngineCoreOutputs) -> bool:
    return bool(outputs.plain_ids or outputs.outputs or outputs.stats is not None)


EXIT_FAILED = 1

_COLLECT_AFTER = (50_000, 20, 50)
"""When Python's collector runs: a collection visits every token id of every new prompt, so that they shall be few."""


class SocketInbox:
    """Messages from the socket."""

    def __init__(self, socket: Any) -> None:
        import zmq

        self._zmq = zmq
        self._socket = socket
        self._decode = messages.frontend_to_core().decode
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._interrupt_fd, self._interrupt_write_fd = os.pipe()
        self._poller.register(self._interrupt_fd, zmq.POLLIN)

    def interrupt(self) -> None:
        os.write(self._interrupt_write_fd, b"!")

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
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
        end_with_parent(parent_fd)
        self._context = zmq.Context()
        self._input = messages.zmq_socket(self._context, zmq.PULL, input_address, bind=False, linger_ms=2000)
        self._output = messages.zmq_socket(self._context, zmq.PUSH, output_address, bind=False, linger_ms=2000)
        self._inbox = SocketInbox(self._input)
        self._encode = messages.core_to_frontend().encode

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
        came: list[messages.FrontendMessage] = []
        while not came:
            came = self._inbox.receive(block=True)
        first = came[0]
        if isinstance(first, messages.Shutdown):
            return None
        if not isinstance(first, messages.Start):
            raise EngineError(f"the first message to an engine core must be messages.Start, not {type(first).__name__}")
        config = config_from_plain(first.config)
        trace_this_thread_if_asked(config.instance_id)
        load_general_plugins("core")
        executor: Executor | None = None
        if first.executor is not None:
            executor = import_class(first.executor, "executor")(config)
        core = EngineCore(config, executor, serves=True)
        gc.collect()
        gc.freeze()  # what was loaded stays: later collections need not look at it
        gc.set_threshold(*_COLLECT_AFTER)
        self._send(core.ready())
        return core

    def _send(self, message: messages.CoreMessage) -> None:
        self._output.send(self._encode(message))


def main(arguments: list[str]) -> int:
    set_process_label("core")
    input_address, output_address, parent_fd, life_fd = arguments
    return CoreProcess(input_address, output_address, int(parent_fd), int(life_fd)).run()
