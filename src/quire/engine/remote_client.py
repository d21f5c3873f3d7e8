"""A core that is spoken to in bytes: what its clients have in common, however the bytes get there.

Knows messages; knows no sockets.
"""

import abc
import threading
import time

from quire.codec import encode
from quire.engine import messages
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.messages import CoreMessage, Dead, FrontendMessage
from quire.errors import ConfigError, EngineDeadError, RequestError


class RemoteClient(CoreClient):
    """Encodes messages for a core, and hands out what comes from it.

    Args:
        on_message: called with every message, in a thread of this client's; the last one is `Dead`.
    """

    shares_memory = False

    def __init__(self, on_message: OnMessage) -> None:
        self._decode = messages.decoder_at_frontend()
        self._on_message = on_message
        self._listener: threading.Thread | None = None

    def _await_ready(self, timeout_s: float) -> bool:
        """Wait until the core serves; whether it does.
        Raises ConfigError: the core refuses its configuration.
        Raises EngineDeadError: it died while it started."""
        deadline = time.monotonic() + timeout_s
        while (message := self._receive(max(0.0, deadline - time.monotonic()))) is not None:
            match message:
                case messages.Ready():
                    self.ready = message
                    return True
                case Dead(message=text, is_config_error=True, setting=setting):
                    raise ConfigError(text, setting=setting)
                case Dead(message=text):
                    raise EngineDeadError(f"the engine core could not start: {text}")
                case _:
                    pass
        return False

    def _start_listener(self) -> None:
        self._listener = threading.Thread(target=self._listen, name="engine-core-listener", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        message: CoreMessage | None = None
        while not isinstance(message, Dead):
            try:
                message = self._receive()
            except Exception as error:  # a message that is none: the core is not to be trusted any more
                message = Dead(f"the engine core sent something unreadable: {error}")
            if message is not None:
                self._on_message(message)

    def send(self, message: FrontendMessage) -> None:
        """Send a message. Waits only for a core that has not connected yet; one that has ended gets none.
        Raises RequestError: it holds something that is not data, for example a function."""
        try:
            data = encode(message)
        except TypeError as error:
            raise RequestError(
                f"{error}: name a method of the worker, or a class by its path; or run the core in-process",
                param="method" if isinstance(message, messages.UtilityCall) else None,
            ) from None
        self._send_data(data)

    @abc.abstractmethod
    def _send_data(self, *frames: bytes) -> None:
        """Send one message; a core that has ended gets none."""

    @abc.abstractmethod
    def _receive(self, timeout_s: float | None = None) -> CoreMessage | None:
        """The next message; None after `timeout_s`. The other process's death is a `Dead`, after everything that it said."""
