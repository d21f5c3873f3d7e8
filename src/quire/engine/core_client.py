"""How a frontend reaches an engine core: one interface, whether the core runs in the caller, in a thread or in another process.

A client sends messages to a core and hands out the core's messages: a blocking client returns them, any other calls
`on_message` from a thread of its own.
"""

import abc
import collections
import concurrent.futures
import faulthandler
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox, last_words
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    CoreMessage,
    Dead,
    FrontendMessage,
    GivenUp,
    Restarted,
    Restarting,
    Shutdown,
    Stalled,
)
from quire.engine.watchdog import Watchdog
from quire.errors import EngineDeadError, EngineError, describe
from quire.executor.interface import Executor
from quire.logger import init_logger, trace_this_thread_if_asked
from quire.patch import bootstrap
from quire.request import EngineCoreOutputs

logger = init_logger(__name__)

_STDERR = 2

OnMessage = Callable[[CoreMessage], None]


class CoreClient(abc.ABC):
    """A running engine core, as a frontend sees it.

    Attributes:
        shares_memory: objects reach the core as they are, functions among them.
        ready: what the core said when it began to serve.
    """

    shares_memory: bool
    ready: messages.Ready

    @abc.abstractmethod
    def send(self, message: FrontendMessage) -> None:
        """Send a message, from any thread; a core that has ended gets none.
        Raises RequestError: it holds something that cannot be sent."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the core and wait for its end; may be called twice."""


class BlockingClient(CoreClient):
    """A core whose messages the caller waits for."""

    death: EngineDeadError | None = None

    @abc.abstractmethod
    def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs; waits for them. Only to be called while requests are unfinished.
        Raises EngineDeadError: the core has died."""

    @abc.abstractmethod
    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value.
        Raises RequestError: it cannot be done.
        Raises EngineError: it failed."""

    def check_alive(self) -> None:
        """Raises EngineDeadError when the core has ended."""
        if self.death is not None:
            raise self.death


class InprocClient(BlockingClient):
    """The core is an object of this process and steps when `get_outputs` is called."""

    shares_memory = True

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        bootstrap("core")
        self.core = EngineCore(config, executor)
        self.ready = self.core.ready()

    def send(self, message: FrontendMessage) -> None:
        if self.death is not None:
            return
        match message:
            case AddRequests(requests=requests, again=again):
                self.core.add_requests(requests, again=again)
            case AbortRequests(request_ids=request_ids):
                self.core.abort_requests(request_ids)
            case _:
                raise TypeError(f"a core in this process takes no {type(message).__name__} message")

    def get_outputs(self) -> EngineCoreOutputs:
        self.check_alive()
        try:
            return self.core.step()
        except Exception as error:  # whatever a model or a kernel raises: after it the core's state is unknown
            self.death = EngineDeadError(f"the engine core failed: {describe(error)}")
            raise self.death from error

    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        self.check_alive()
        return self.core.call_utility(utility, *args, **kwargs)

    def shutdown(self) -> None:
        self.core.shutdown()
        self.death = self.death or EngineDeadError("the engine was shut down")


class WaitingClient(BlockingClient):
    """A core that calls with its messages, for a caller that waits for them, in one thread at a time.

    Args:
        start: starts a core that calls what it is given with its messages, in any thread.

    Attributes:
        on_change: called, in the caller's thread, when the core has died and is started again, with what its client says of it.

    Raises:
        ConfigError, EngineDeadError: the core does not start.
    """

    def __init__(self, start: Callable[[OnMessage], CoreClient]) -> None:
        self.on_change: Callable[[Restarting | GivenUp | Restarted], None] = _ignore
        self._messages: queue.SimpleQueue[CoreMessage] = queue.SimpleQueue()
        self._early: collections.deque[EngineCoreOutputs] = collections.deque()
        """Outputs that came while a call waited for its value."""
        self._num_calls = 0
        self._restarting = ""
        self.client = start(self._messages.put)
        # Of one that is dropped without `shutdown`. At the interpreter's end the core ends with this process.
        weakref.finalize(self, _end_beside, self.client).atexit = False
        self.ready = self.client.ready
        self.shares_memory = self.client.shares_memory

    def send(self, message: FrontendMessage) -> None:
        self.client.send(message)

    def _receive(self) -> CoreMessage:
        """The next message. Raises EngineDeadError: it is that the core has died for good."""
        self.check_alive()
        message = self._messages.get()
        match message:
            case Dead(message=text):
                self.death = EngineDeadError(text)
                raise self.death
            case Restarting(message=text, is_whole=is_whole):
                self._restarting = text if is_whole else ""
                self.on_change(message)
            case Restarted():
                self._restarting = ""
                self.on_change(message)
            case GivenUp():
                self.on_change(message)
            case _:
                pass
        return message

    def get_outputs(self) -> EngineCoreOutputs:
        """The next step's outputs; empty ones when a request was given up, which may have been the last."""
        if self._early:
            return self._early.popleft()
        while True:
            match self._receive():
                case messages.Outputs(outputs=outputs):
                    return outputs
                case GivenUp():
                    return EngineCoreOutputs()
                case _:
                    pass

    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """While a core is started again, the call waits for it. Raises EngineError also when the core dies during the call."""
        while not self._messages.empty():
            self._receive_early()
        while self._restarting:
            self._receive_early()
        self.check_alive()
        self._num_calls += 1
        self.send(messages.UtilityCall(self._num_calls, utility, list(args), kwargs))
        while True:
            message = self._receive_early()
            if isinstance(message, messages.UtilityResult) and message.call_id == self._num_calls:
                return message.get()
            if isinstance(message, Restarting) and message.is_whole:
                raise EngineError(f"the engine core died and is started again: {message.message}")

    def _receive_early(self) -> CoreMessage:
        """The next message; outputs are kept for `get_outputs`."""
        message = self._receive()
        if isinstance(message, messages.Outputs):
            self._early.append(message.outputs)
        return message

    def shutdown(self) -> None:
        self.client.shutdown()
        self.death = self.death or EngineDeadError("the engine was shut down")


def _end_beside(client: CoreClient) -> None:
    """End a core; the collector, which may call in any thread, does not wait for that."""
    threading.Thread(target=client.shutdown, name="engine-core-end", daemon=True).start()


def _ignore(message: CoreMessage) -> None:
    pass


class ThreadClient(CoreClient):
    """The core runs in a thread, which also builds it.

    Args:
        on_message: called in the core's thread.

    Raises:
        ConfigError: what the core's construction raised.
    """

    shares_memory = True

    def __init__(self, config: EngineConfig, on_message: OnMessage) -> None:
        self._config = config
        self._on_message = on_message
        self._inbox = ThreadInbox()
        self._beginning = concurrent.futures.Future[None]()
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        self._beginning.result()
        self._watchdog.begin()

    def _run(self) -> None:
        try:
            bootstrap("core")
            trace_this_thread_if_asked(self._config.instance_id)
            core = EngineCore(self._config, serves=True)
            self.ready = core.ready()
            self._watchdog = Watchdog(core.heartbeat.words, self._on_hang)
        except BaseException as error:  # handed to the thread that waits for the start
            self._beginning.set_exception(error)
            return
        self._beginning.set_result(None)
        try:
            CoreLoop(core, self._inbox, self._on_message).run()
            self._on_message(Dead("the engine was shut down"))
        except Exception as error:
            self._on_message(last_words(error))
        finally:
            core.shutdown()

    def _on_hang(self, reason: str) -> None:
        """In the watching thread. A thread cannot be ended: say it, and where the threads are."""
        if reason:
            reason = f"the engine core {reason}; it is a thread of this process and cannot be replaced"
            logger.error("%s; stacks of this process:", reason)
            faulthandler.dump_traceback(file=_STDERR)
        else:
            logger.warning("the engine core makes progress again")
        self._on_message(Stalled(reason))

    def send(self, message: FrontendMessage) -> None:
        self._inbox.put(message)
        self._watchdog.sent()

    def shutdown(self) -> None:
        """End the thread after the step that it is in."""
        self._watchdog.end()
        self._inbox.put(Shutdown())
        if self._thread is not threading.current_thread():
            self._thread.join()
