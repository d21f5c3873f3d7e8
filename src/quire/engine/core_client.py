"""How a frontend reaches an engine core: a synchronous one by a client, an asynchronous one by a channel (`send`, and a callback
from another thread). The core runs in the caller, in a thread or in a child process."""

import abc
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox, call_utility, describe_death
from quire.engine.messages import CoreMessage, Dead, FrontendMessage, Shutdown
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.executor.interface import Executor
from quire.logger import init_logger
from quire.request import EngineCoreOutputs, EngineRequest

logger = init_logger(__name__)


class CoreClient(abc.ABC):
    """A core, as a synchronous frontend sees it. `ready`: what the core said when it began to serve."""

    ready: messages.Ready

    @abc.abstractmethod
    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests."""

    @abc.abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""

    @abc.abstractmethod
    def get_outputs(self) -> EngineCoreOutputs:
        """The next step's news; blocks until there is some. Only to be called while requests are unfinished.
        Raises EngineDeadError: the core has died."""

    @abc.abstractmethod
    def call(self, utility: messages.Utility, *args: Any) -> Any:
        """Call a utility and wait for its value.
        Raises RequestError: it cannot be done.
        Raises EngineError: it failed."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the core; may be called twice."""


class InprocClient(CoreClient):
    """The core is an object of this process and steps when `get_outputs` is called."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.core = EngineCore(config, executor)
        self.ready = self.core.ready()
        self._dead: EngineDeadError | None = None

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self._check_alive()
        self.core.add_requests(requests)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if self._dead is None:
            self.core.abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        self._check_alive()
        try:
            return self.core.step()
        except Exception as error:  # whatever a model or a kernel raises: after it the core's state is unknown
            message = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._dead = EngineDeadError(f"the engine core failed: {message}")
            raise self._dead from error

    def call(self, utility: messages.Utility, *args: Any) -> Any:
        self._check_alive()
        return call_utility(self.core, utility, list(args))

    def shutdown(self) -> None:
        self.core.shutdown()
        self._dead = self._dead or EngineDeadError("the engine was shut down")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead


class ProcessClient(CoreClient):
    """The core is a child process."""

    def __init__(self, config: EngineConfig, executor: str | None = None) -> None:
        from quire.engine.process_client import CoreProcessHandle  # not needed, and slow to import, in-process

        self.handle = CoreProcessHandle(config, executor)
        self.ready = self.handle.ready
        self._kept: collections.deque[EngineCoreOutputs] = collections.deque()
        self._num_calls = 0
        self._dead: EngineDeadError | None = None

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self._check_alive()
        self.handle.send(messages.AddRequests(requests))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if self._dead is None:
            self.handle.send(messages.AbortRequests(list(request_ids)))

    def get_outputs(self) -> EngineCoreOutputs:
        if self._kept:
            return self._kept.popleft()
        while True:
            message = self._receive()
            if isinstance(message, messages.Outputs):
                return message.outputs

    def call(self, utility: messages.Utility, *args: Any) -> Any:
        """Call a utility; outputs that come meanwhile are kept."""
        self._check_alive()
        self._num_calls += 1
        self.handle.send(messages.UtilityCall(self._num_calls, utility, list(args)))
        while True:
            message = self._receive()
            if isinstance(message, messages.Outputs):
                self._kept.append(message.outputs)
            elif isinstance(message, messages.UtilityResult) and message.call_id == self._num_calls:
                if message.error is not None:
                    raise message.to_error()
                return message.value

    def shutdown(self) -> None:
        self.handle.shutdown()
        self._dead = self._dead or EngineDeadError("the engine was shut down")

    def _receive(self) -> messages.CoreMessage | None:
        self._check_alive()
        message = self.handle.receive()
        if isinstance(message, messages.Dead):
            self._dead = EngineDeadError(message.message)
            raise self._dead
        return message

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead


OnMessage = Callable[[CoreMessage], None]


class CoreChannel(abc.ABC):
    """A running core, as an asynchronous frontend sees it. `shares_memory`: whether objects reach it as they are; `ready`: what
    the core said when it began to serve."""

    shares_memory: bool
    ready: messages.Ready

    @abc.abstractmethod
    def send(self, message: FrontendMessage) -> None:
        """Send a message; never blocks."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the core and wait for its end; may be called twice."""


class ThreadChannel(CoreChannel):
    """The core runs in a thread, which also builds it.

    Args:
        on_message: called in the core's thread.

    Raises:
        ConfigError: what the core's construction raised.
    """

    shares_memory = True

    def __init__(
        self,
        config: EngineConfig,
        on_message: OnMessage,
        make_executor: Callable[[EngineConfig], Executor] | None = None,
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._make_executor = make_executor
        self._inbox = ThreadInbox()
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def _run(self) -> None:
        try:
            executor = self._make_executor(self._config) if self._make_executor is not None else None
            core = EngineCore(self._config, executor, serves=True)
            self.ready = core.ready()
        except BaseException as error:  # handed to the thread that waits for the start
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            CoreLoop(core, self._inbox, self._on_message).run()
            self._on_message(Dead("the engine was shut down"))
        except Exception as error:
            if isinstance(error, QuireError):
                logger.error("the engine core ends: %s", error)
            else:
                logger.exception("the engine core ends")
            self._on_message(describe_death(error))
        finally:
            core.shutdown()

    def send(self, message: FrontendMessage) -> None:
        self._inbox.put(message)

    def shutdown(self) -> None:
        """End the thread after the step that it is in."""
        self._inbox.put(Shutdown())
        if self._thread is not threading.current_thread():
            self._thread.join()


class ProcessChannel(CoreChannel):
    """The core runs in a child process; a thread here listens to it.

    Args:
        on_message: called in the listening thread.

    Raises:
        ConfigError: the core refused its configuration.
        EngineDeadError: it died before it was ready.
    """

    shares_memory = False

    def __init__(self, config: EngineConfig, on_message: OnMessage, executor: str | None = None) -> None:
        self._on_message = on_message
        from quire.engine.process_client import CoreProcessHandle  # not needed, and slow to import, in-process

        self.handle = CoreProcessHandle(config, executor)
        self.ready = self.handle.ready
        self._ends = False
        self._thread = threading.Thread(target=self._listen, name="engine-core-listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                message = self.handle.receive()
            except Exception as error:  # a message that is none: the child is not to be trusted any more
                message = Dead(f"the engine core sent something unreadable: {error}")
            if isinstance(message, Dead):
                self._on_message(Dead("the engine was shut down") if self._ends else message)
                return
            if message is not None:
                self._on_message(message)

    def send(self, message: FrontendMessage) -> None:
        """Send a message. Raises RequestError: it holds a function."""
        self.handle.send(message)

    def shutdown(self) -> None:
        """End the child, then the listener, which hears of it."""
        self._ends = True
        self.handle.end_child()
        self._thread.join()
        self.handle.close()


def open_channel(config: EngineConfig, core: str | None, on_message: OnMessage) -> CoreChannel:
    """A running core.

    Args:
        core: `inproc` (a thread), `process`, or None: a thread on a CPU, where processes would fight for the cores, and a
            process otherwise.
    """
    if core is None:
        core = "inproc" if config.device.device == "cpu" else "process"
    if core == "inproc":
        return ThreadChannel(config, on_message)
    if core == "process":
        return ProcessChannel(config, on_message)
    raise ConfigError(f"core is {core!r}; it may be 'inproc' or 'process'", setting="core")
