"""Copies of the model on other hosts, as the head node sees them: a client for each, whose host has come to the door.

A host that is gone may join again: `RecoveringClient` then starts the copy there, as it would start one here.
"""

from quire.codec import encode
from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core_client import OnMessage
from quire.engine.messages import CoreMessage, Dead
from quire.engine.remote_client import RemoteClient
from quire.engine.shared_copies import CopySeat
from quire.errors import EngineDeadError
from quire.executor.host_door import HostDoor
from quire.logger import init_logger
from quire.patch import marks

logger = init_logger(__name__)

SETTINGS = ("data_parallel_address", "data_parallel_rpc_port")
_PATIENCE_S = 5.0
"""How long a copy may take to end in good order."""


def place_of_head(config: EngineConfig) -> tuple[str, int]:
    """Where copies of other hosts join."""
    return config.parallel.data_parallel_address, config.parallel.data_parallel_rpc_port


def open_door(config: EngineConfig) -> HostDoor:
    """A door with a seat for each copy that other hosts are to run. Raises ConfigError: the address cannot be used."""
    numbers = range(config.parallel.data_parallel_size)[config.parallel.num_copies_here :]
    return HostDoor(config, place_of_head(config), SETTINGS, "copy", numbers, encode(messages.Shutdown()))


class NodeClient(RemoteClient):
    """A core that a host runs which has joined. Waits for one. When the door is closed the host ends, else it joins again.

    Args:
        standing: of the core in whose place it is started.
        seat: of a copy that shares experts.

    Raises:
        ConfigError: the core refuses its configuration.
        EngineDeadError: it died while it started, or the engine ends.
    """

    def __init__(
        self,
        door: HostDoor,
        number: int,
        on_message: OnMessage,
        standing: messages.Standing | None = None,
        *,
        seat: CopySeat | None = None,
    ) -> None:
        super().__init__(on_message)
        self._door, self._number, self._seat, self._is_ending = door, number, seat, False
        while not self._starts(standing):
            logger.warning("copy %d does not start: %s; it waits for a host", number, self._goodbye)
        logger.info("copy %d runs on %s", number, self._link.peer)
        self._start_listener()

    def _starts(self, standing: messages.Standing | None) -> bool:
        """Whether the next host starts its core; not if it is gone before, or another copy ends."""
        (self._link, join), is_ready = self._door.take(self._number), False
        self._is_gone, rendezvous = False, ""
        self._goodbye = f"its host ({self._link.peer}) is gone"
        try:
            if self._seat is not None:
                rendezvous = self._seat.join(join.meeting_places[0])
                self._seat.hold(self._give_up)
            self.send(messages.Start({}, None, standing, marks(), rendezvous))
            is_ready = self._await_ready(float("inf"))
        except EngineDeadError:
            if not self._is_gone or self._door.is_closed:
                raise
        finally:
            if not is_ready:
                self._part()
                self._link.close()
                if self._seat is not None:
                    self._seat.leave()
        return is_ready

    def _give_up(self) -> None:
        """Another copy has ended, or the engine: this one is of no use."""
        self._goodbye = "another copy, with which it shares experts, has ended"
        self._part()
        self._link.close()

    def _part(self) -> None:
        if self._door.is_closed:
            self.send(messages.Shutdown())
        self._link.end()

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
        self._part()
        if self._listener is not None:
            self._listener.join(_PATIENCE_S)
        self._link.close()
