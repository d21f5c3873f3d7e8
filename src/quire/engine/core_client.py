"""How a frontend reaches an engine core: one interface, whether the core runs in the caller, in a thread or in another process.

A client sends messages to a core and hands out the core's messages: a blocking client returns them, any other calls
`on_message` from a thread of its own.
"""

import abc
import faulthandler
import threading
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox, last_words
from quire.engine.messages import AbortRequests, AddRequests, CoreMessage, Dead, FrontendMessage, Shutdown, Stalled
from quire.engine.watchdog import Watchdog
from quire.errors import EngineDeadError, describe
from quire.executor.interface import Executor
from quire.logger import init_logger
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
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error
        self._watchdog.begin()

    def _run(self) -> None:
        try:
            core = EngineCore(self._config, serves=True)
            self.ready = core.ready()
            self._watchdog = Watchdog(core.heartbeat.words, self._on_hang)
        except BaseException as error:  # handed to the thread that waits for the start
            self._start_error = error
            return
        finally:
            self._started.set()
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
