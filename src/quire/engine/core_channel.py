"""How an asynchronous frontend reaches an engine core: messages go out with `send`, answers come by a callback from another
thread. The core runs in a thread of this process, or in a child process. One interface for both.
"""

import abc
import threading
from collections.abc import Callable

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox, describe_death
from quire.engine.messages import CoreMessage, Dead, FrontendMessage, Shutdown
from quire.errors import ConfigError, QuireError
from quire.executor.interface import Executor
from quire.logger import init_logger

logger = init_logger(__name__)

OnMessage = Callable[[CoreMessage], None]


class CoreChannel(abc.ABC):
    """A running core, as an asynchronous frontend sees it. `shares_memory`: whether objects reach it as they are."""

    shares_memory: bool

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
            core = EngineCore(self._config, executor)
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
