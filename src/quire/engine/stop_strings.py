"""Stop strings in a growing text: found wherever the pieces are cut, and text held back while one may be forming."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request.

    Args:
        stops: at least one; none empty.
        include: whether the output keeps the stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops))

    def find(self, text: str, checked: int) -> tuple[str, int] | None:
        """The stop string that ends first after position `checked`, and where the output's text ends because of it.

        The first to be complete wins; among those that end at the same character, the longest. So the result does not
        depend on how the text was cut into pieces.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, checked - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        end, start, stop = best
        return stop, end if self._include else start

    def held_back(self, text: str) -> int:
        """Characters at the text's end that may turn out to begin a stop string; none when stop strings are kept."""
        if self._include:
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stops):
                return length
        return 0
