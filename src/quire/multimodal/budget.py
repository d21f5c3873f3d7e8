"""How much all media of one request may be together, whichever thread decodes them."""

import threading

from quire.multimodal.web_fetch import MediaError


class Budget:
    """So many pixels, or samples.

    Args:
        items, units: what is counted, for errors.
    """

    def __init__(self, most: int, items: str, units: str) -> None:
        self._most = self._left = most
        self._items, self._units = items, units
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Raises MediaError: they are too many."""
        with self._lock:
            if count > self._left:
                raise MediaError(f"the {self._items} of the request have more than {self._most} {self._units} together")
            self._left -= count
