"""The loop that an engine core runs in a thread or a process of its own: messages in, steps, messages out.

When there is nothing to do the executor may prepare for later work, in short calls between which the inbox is looked into.
When that is done too, the loop waits in the inbox, which blocks on a lock or a file descriptor and uses no CPU.
"""

import queue
from collections.abc import Callable
from typing import Protocol

from quire.engine import messages
from quire.engine.core import EngineCore
from quire.errors import ConfigError, QuireError, describe
from quire.logger import init_logger
from quire.request import EngineCoreOutputs

logger = init_logger(__name__)


class Inbox(Protocol):
    """Where a core's messages come from."""

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        """Every message that has come; with `block`, waits for the first."""
        ...

    def interrupt(self) -> None:
        """Have a waiting `receive` return, with nothing; from any thread."""


class ThreadInbox:
    """Messages from other threads of this process, as objects."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[messages.FrontendMessage | None] = queue.SimpleQueue()

    def put(self, message: messages.FrontendMessage) -> None:
        """Hand over a message; from any thread."""
        self._messages.put(message)

    def interrupt(self) -> None:
        self._messages.put(None)

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        came = [self._messages.get()] if block else []
        while not self._messages.empty():
            came.append(self._messages.get())
        return [message for message in came if message is not None]


def last_words(error: BaseException) -> messages.Dead:
    """Write an error that ends a core to the log; what frontends are told of it."""
    if isinstance(error, QuireError):
        logger.error("the engine core ends: %s", error)
    else:
        logger.error("the engine core ends", exc_info=error)
    if isinstance(error, ConfigError):
        return messages.Dead(str(error), True, error.setting)
    return messages.Dead(describe(error))


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
        self._standing = core.standing()
        self._was_draining = False

    def run(self) -> None:
        """Returns after a `messages.Shutdown`; raises what a step raised."""
        core, inbox = self._core, self._inbox
        core.on_failure(inbox.interrupt)
        could_prepare = True
        while True:
            waits = not could_prepare and not core.has_work()
            if waits:
                core.heartbeat.rest()
            taken = inbox.receive(block=waits)
            if taken:
                core.heartbeat.took(len(taken))
            for message in taken:
                if isinstance(message, messages.Shutdown):
                    return
                self._handle(message)
            if not core.has_work():  # also after an interruption: `idle` says what was wrong
                core.heartbeat.prepare()
                could_prepare = core.idle()
            else:
                could_prepare = True
                outputs = core.step()
                if outputs.has_content:
                    self.tell(outputs)
                if core.is_draining or self._was_draining:
                    self._tell_standing()

    def tell(self, outputs: EngineCoreOutputs) -> None:
        """Send a step's outputs."""
        self._send(messages.Outputs(outputs))

    def _tell_standing(self) -> None:
        """Say how the core stands, if that has changed."""
        self._was_draining = self._core.is_draining
        standing = self._core.standing()
        if standing != self._standing:
            self._standing = standing
            self._send(standing)

    def _handle(self, message: messages.FrontendMessage) -> None:
        match message:
            case messages.AddRequests(requests=requests, again=again):
                self._core.add_requests(requests, again=again)
            case messages.AbortRequests(request_ids=request_ids):
                self._core.abort_requests(request_ids)
            case messages.TakePart(number=number):
                self._core.turns.wake(number)
            case messages.UtilityCall():
                self._core.heartbeat.call(_timeout_of(message))
                answer = self._answer(message)
                self._tell_standing()  # what was answered is kept, also by a core that takes this one's place
                if (outputs := self._core.take_outputs()).has_content:  # what it led to comes first
                    self.tell(outputs)
                self._send(answer)
            case messages.Start() | messages.Shutdown():
                logger.warning("a running engine core got a %s message", type(message).__name__)

    def _answer(self, call: messages.UtilityCall) -> messages.UtilityResult:
        try:
            return messages.UtilityResult(
                call.call_id, self._core.call_utility(call.utility, *call.args, **call.kwargs)
            )
        except Exception as error:  # the caller's to know; the engine goes on
            refusal = messages.refusal_of(error)
            text = str(error) if refusal is not None else f"{call.utility}: {describe(error)}"
            return messages.UtilityResult(call.call_id, error=text, refusal=refusal)


def _timeout_of(call: messages.UtilityCall) -> float:
    """Seconds that the caller allows the workers."""
    given = call.kwargs.get("timeout", next(iter(call.args[1:]), None))
    return given if call.utility == "collective_rpc" and isinstance(given, int | float) else 0.0
