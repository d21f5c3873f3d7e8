"""The door of a head node: other hosts come to it with their part of an engine, copies of the model or ranks of one copy.

Both sides are here: the door has a seat for each host or copy, `knock` looks for it. Who comes says what must be the same on both
sides, and is refused in words where it differs.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import msgspec

from quire import envs
from quire.codec import decoder, encode
from quire.config import EngineConfig
from quire.config.wire import config_to_plain
from quire.errors import ConfigError, EngineDeadError
from quire.executor.host_link import MAX_GREETING_BYTES, MAX_MESSAGE_BYTES, HostLink
from quire.logger import init_logger
from quire.patch import check_same
from quire.version import __version__

logger = init_logger(__name__)

AnswerT = TypeVar("AnswerT")
KNOCK_S = 1.0
"""How long a host waits before it looks for its head node again."""


class Join(msgspec.Struct, array_like=True):
    """What a host says first: which seat it would take, and what must be the same on both sides.

    Attributes:
        meeting_places: addresses there at which ranks can meet.
    """

    number: int
    version: str
    settings: dict[str, Any]
    meeting_places: list[str] = []


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The answer to a host that cannot join."""

    message: str


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    """What the hosts of one model must have in common."""
    plain = config_to_plain(config)
    names = ("dtype", "quantization", "max_model_len", "seed", "hf_config", "max_logprobs")
    sizes = ["tensor_parallel_size", "pipeline_parallel_size", "nnodes", "enable_expert_parallel", "copies_everywhere"]
    if config.parallel.enable_expert_parallel and config.parallel.copies_everywhere > 1:
        sizes += ["prefill_context_parallel_size", "all2all_backend", "eplb"]
    shared = {name: plain["model"][name] for name in names} | {name: plain["parallel"][name] for name in sizes}
    return shared | {"enable_lora": config.lora is not None}


class Over(msgspec.Struct, tag="shutdown", array_like=True):
    """What a host may get in place of an answer: the engine ends in good order. The same bytes end a copy that serves
    (`messages.Shutdown`), since who says them need not know how far the host is."""


class EngineOver(Exception):
    """The head node has ended in good order: nobody shall look for it."""


class HostDoor:
    """Listens for hosts that join, and has a seat for each.

    Args:
        place: the address and the port, which `settings` name.
        what: has seats, each with its number: a copy, a node.
        farewell: what those get who still wait for an answer when the door is closed.

    Attributes:
        is_closed: nobody is let in any more.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: tuple[str, int],
        settings: tuple[str, str],
        what: str,
        numbers: Iterable[int],
        farewell: bytes = b"",
    ) -> None:
        try:
            self._server = socket.create_server(place, backlog=64)
        except OSError as error:
            text = f"{' and '.join(settings)} give the address {place[0]}:{place[1]}, which cannot be used: {error}"
            raise ConfigError(text, setting=settings[1]) from error
        self._settings, self._what, self._farewell = shared_settings(config), what, farewell
        self.is_closed = False
        self._seats: dict[int, queue.SimpleQueue[tuple[HostLink, Join] | None]]
        self._seats = {number: queue.SimpleQueue() for number in numbers}
        threading.Thread(target=self._accept, name="host-door", daemon=True).start()
        logger.info("waiting for %s %s at %s:%d", what, ", ".join(map(str, self._seats)), *place)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the door was closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(connection,), name="host-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone again
            link = HostLink(connection, MAX_GREETING_BYTES)
            data = link.receive()
            problem = "it says nothing" if data is None else self._seat(link, data)
            if problem:
                logger.warning("a host (%s) cannot join: %s", link.peer, problem)
                link.send(encode(Refused(f"the head node refuses this host: {problem}")))
                link.close()

    def _seat(self, link: HostLink, data: bytes) -> str:
        """Give a host its seat; what is wrong with it, if anything."""
        try:
            join = decoder(Join)(data)
        except msgspec.MsgspecError as error:
            return f"its message cannot be read ({error}): install the same version ({__version__})"
        if join.version != __version__:
            return f"it has version {join.version}, and the head node {__version__}"
        for name, own in self._settings.items():
            if (other := join.settings.get(name)) != own:
                values = "" if name == "hf_config" else f": {other!r} there, {own!r} at the head node"
                return f"{'config.json' if name == 'hf_config' else name} differs{values}"
        if join.number not in self._seats:
            return f"it has number {join.number}, and the head node waits for {self._what} {', '.join(map(str, self._seats))}"
        link.most = MAX_MESSAGE_BYTES
        self._seats[join.number].put((link, join))
        if self.is_closed:
            self._dismiss()
        return ""

    def take(self, number: int, timeout_s: float | None = None) -> tuple[HostLink, Join]:
        """The next host that would take a seat; waits for it.
        Raises EngineDeadError: the door is closed, or nobody has come in time."""
        try:
            seated = self._seats[number].get(timeout=timeout_s)
        except queue.Empty:
            raise EngineDeadError(f"{self._what} {number} has not joined within {timeout_s:.0f} s") from None
        if seated is None:
            self._seats[number].put(None)  # for who comes next
            raise EngineDeadError("the engine ends, and waits for no host")
        return seated

    def close(self) -> None:
        """Let nobody in any more, and wait for nobody; those that wait here are sent away."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        self._dismiss()

    def _dismiss(self) -> None:
        for seat in self._seats.values():
            with contextlib.suppress(queue.Empty):
                while True:
                    if (seated := seat.get_nowait()) is not None:
                        seated[0].send(self._farewell)
                        seated[0].close()
            seat.put(None)


def visit(place: tuple[str, int], settings: tuple[str, str], serve: Callable[[HostLink], bool]) -> None:
    """Go to a head node, and again as long as `serve` returns true when the connection has ended.
    Raises EngineDeadError: there is none."""
    goes_on = True
    while goes_on:
        link = knock(place, settings)
        try:
            goes_on = serve(link)
        except EngineOver:
            return
        finally:
            link.close()


def ask(link: HostLink, join: Join, answer: type[AnswerT]) -> AnswerT | None:
    """Take a seat: the head node's answer; None if it is gone. Raises ConfigError: it refuses. Raises EngineOver: it ends."""
    link.send(encode(join))
    if (data := link.receive()) is None:
        return None
    given: Any = decoder(answer | Refused | Over)(data)
    if isinstance(given, Refused):
        raise ConfigError(given.message)
    if isinstance(given, Over):
        raise EngineOver
    check_same(given.patches, "the head node")
    return cast(AnswerT, given)


def knock(place: tuple[str, int], settings: tuple[str, str]) -> HostLink:
    """Connect to a head node; waits for it. Raises EngineDeadError: there is none."""
    patience_s = envs.QUIRE_ENGINE_READY_TIMEOUT_S
    deadline = time.monotonic() + patience_s
    is_told = False
    while True:
        try:
            return HostLink(socket.create_connection(place, KNOCK_S))
        except OSError as error:
            where = f"no head node at {place[0]}:{place[1]} ({', '.join(settings)})"
            if time.monotonic() > deadline:
                raise EngineDeadError(f"{where} within {patience_s:.0f} s: {error}") from error
            if not is_told:
                logger.info("%s yet: it is waited for", where)
            is_told = True
            time.sleep(KNOCK_S)
