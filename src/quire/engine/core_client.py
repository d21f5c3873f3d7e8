"""How a synchronous frontend reaches an engine core: in its own process, or in a child process. One interface for both."""

import abc
import collections
from collections.abc import Sequence
from typing import Any

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core import EngineCore
from quire.engine.core_loop import call_utility
from quire.errors import EngineDeadError, EngineError, QuireError
from quire.executor.interface import Executor
from quire.request import EngineCoreOutputs, EngineRequest


class CoreClient(abc.ABC):
    """A core, as a synchronous frontend sees it."""

    @abc.abstractmethod
    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests."""

    @abc.abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""

    @abc.abstractmethod
    def get_outputs(self) -> EngineCoreOutputs:
        """The next step's news; blocks until there is some. Only to be called while requests are unfinished.

        Raises:
            EngineDeadError: the core has died.
        """

    @abc.abstractmethod
    def call(self, utility: messages.Utility, *args: Any) -> Any:
        """Call a utility and wait for its value. Raises EngineError: it failed."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the core; may be called twice."""


class InprocClient(CoreClient):
    """The core is an object of this process and steps when `get_outputs` is called."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.core = EngineCore(config, executor)
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
                    raise EngineError(message.error)
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
