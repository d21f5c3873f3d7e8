"""Ctrl-C in the middle of an engine's step."""

import signal
import threading
from types import FrameType


class DeferredInterrupt:
    """While it is entered, Ctrl-C is remembered; `check` raises it. A second Ctrl-C does not wait.

    Does nothing outside the main thread, or where the program handles Ctrl-C in its own way.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> "DeferredInterrupt":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._remember)
            self._is_installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    def check(self) -> None:
        """Raise the KeyboardInterrupt that came."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt
