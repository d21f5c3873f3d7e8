"""Copies of the model on other hosts, as the head node sees them: the door at which their hosts join, and a client for each copy.

A host that is gone may join again: `RecoveringClient` then starts the copy there, as it would start one here.
"""

import contextlib
import queue
import socket
import threading
from typing import Any

import msgspec

from quire.codec import decoder, encode
from quire.config import EngineConfig
from quire.config.wire import config_to_plain
from quire.engine import messages
from quire.engine.core_client import OnMessage
from quire.engine.host_link import HostLink
from quire.engine.messages import CoreMessage, Dead
from quire.engine.remote_client import RemoteClient
from quire.errors import ConfigError, EngineDeadError
from quire.logger import init_logger
from quire.patch import marks
from quire.version import __version__

logger = init_logger(__name__)

SETTING = "data_parallel_rpc_port"
_PATIENCE_S = 5.0
"""How long a copy may take to end in good order."""


class Join(msgspec.Struct, array_like=True):
    """What a host says first: which copy it would run, and what must be the same on both sides."""

    number: int
    version: str
    settings: dict[str, Any]


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    """What copies of one model must have in common, so that a request can go on at another one."""
    plain, parallel = config_to_plain(config), config.parallel
    names = ("dtype", "quantization", "max_model_len", "seed", "hf_config", "max_logprobs")
    return {name: plain["model"][name] for name in names} | {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "enable_lora": config.lora is not None,
    }


class NodeDoor:
    """Listens for hosts that join, and has a seat for each copy that they are to run.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        place = (parallel.data_parallel_address, parallel.data_parallel_rpc_port)
        try:
            self._server = socket.create_server(place, backlog=64)
        except OSError as error:
            text = f"data_parallel_address and {SETTING} give the address %s:%d, which cannot be used: %s"
            raise ConfigError(text % (*place, error), setting=SETTING) from error
        self._settings = shared_settings(config)
        numbers = range(parallel.data_parallel_size)[parallel.num_copies_here :]
        self._seats: dict[int, queue.SimpleQueue[HostLink | None]] = {number: queue.SimpleQueue() for number in numbers}
        threading.Thread(target=self._accept, name="node-door", daemon=True).start()
        logger.info("waiting for hosts with the copies %s at %s:%d", ", ".join(map(str, numbers)), *place)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the door was closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(connection,), name="node-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone again
            link = HostLink(connection)
            data = link.receive()
            problem = "it says nothing" if data is None else self._seat(link, data)
            if problem:
                logger.warning("a host (%s) cannot join: %s", link.peer, problem)
                link.send(encode(Dead(f"the head node refuses this host: {problem}", is_config_error=True)))
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
            return f"the head node has no seat for copy {join.number}, but for {', '.join(map(str, self._seats))}"
        self._seats[join.number].put(link)
        return ""

    def take(self, number: int) -> HostLink:
        """The next host that would run a copy; waits for it. Raises EngineDeadError: the door is closed."""
        link = self._seats[number].get()
        if link is None:
            self._seats[number].put(None)  # for who comes next
            raise EngineDeadError("the engine ends, and waits for no host")
        return link

    def close(self) -> None:
        """Let nobody in any more, and wait for nobody."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for seat in self._seats.values():
            seat.put(None)


class NodeClient(RemoteClient):
    """A core that a host runs which has joined. Waits for one.

    Args:
        standing: of the core in whose place it is started.

    Raises:
        ConfigError: the core refuses its configuration.
        EngineDeadError: it died while it started, or the engine ends.
    """

    def __init__(
        self, door: NodeDoor, number: int, on_message: OnMessage, standing: messages.Standing | None = None
    ) -> None:
        super().__init__(on_message)
        self._door, self._number, self._is_ending = door, number, False
        while not self._starts(standing):
            logger.warning("copy %d does not start: %s; the next one is waited for", number, self._goodbye)
        logger.info("copy %d runs on %s", number, self._link.peer)
        self._start_listener()

    def _starts(self, standing: messages.Standing | None) -> bool:
        """Whether the next host starts its core; not if it is gone before."""
        self._link, is_ready = self._door.take(self._number), False
        self._is_gone = False
        self.send(messages.Start({}, None, standing, marks()))
        try:
            is_ready = self._await_ready(float("inf"))
        except EngineDeadError:
            if not self._is_gone:
                raise
        finally:
            if not is_ready:
                self._link.close()
        return is_ready

    @property
    def _goodbye(self) -> str:
        return f"its host ({self._link.peer}) is gone"

    def _send_data(self, *frames: bytes) -> None:
        for frame in frames:
            self._link.send(frame)

    def _receive(self, timeout_s: float | None = None) -> CoreMessage | None:
        data = self._link.receive()
        if data is not None:
            return self._decode(data)
        self._is_gone = not self._is_ending
        return Dead(self._goodbye, is_gone=True) if self._is_gone else Dead("the engine was shut down")

    def shutdown(self) -> None:
        self._is_ending = True
        if not self._is_gone:  # else it may come back, and shall join again
            self.send(messages.Shutdown())
        self._link.end()
        if self._listener is not None:
            self._listener.join(_PATIENCE_S)
        self._link.close()
