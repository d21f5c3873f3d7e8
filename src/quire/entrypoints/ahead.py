"""The requests of one call of `LLM`, prepared in parts: a part with images is read while the requests before it run."""

import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.engine.request_record import RequestRecord

PART = 16
"""Prompts of a part."""
PARTS_AHEAD = 2
"""Parts that are prepared before they are asked for."""

Prepare = Callable[[slice], list[RequestRecord]]
"""Makes requests of some of a call's prompts. Raises RequestError: one of them cannot be served."""


class Ahead:
    """What a call asks for. The first part is prepared at once, the others by a thread, in order.

    Args:
        prepare: makes requests, in any thread.
        count: prompts of the call.
        part: prompts of a part.

    Attributes:
        first: the requests of the first part.
    """

    def __init__(self, prepare: Prepare, count: int, part: int) -> None:
        self.count, self.first = count, prepare(slice(0, part))
        self._prepare, self._slices = prepare, deque(slice(at, at + part) for at in range(part, count, part or 1))
        self._coming: deque[Future[list[RequestRecord]]] = deque()
        self._thread = ThreadPoolExecutor(1, "quire-ahead") if self._slices else None
        self._look_ahead()

    @property
    def is_left(self) -> bool:
        """Whether there are parts that nobody has taken."""
        return bool(self._coming)

    def take(self, *, wait: bool) -> Sequence[RequestRecord]:
        """The next part, or nothing while it is being prepared. Raises RequestError: one of it cannot be served.

        Args:
            wait: until it is prepared.
        """
        if not self._coming or not (wait or self._coming[0].done()):
            return ()
        taken = self._coming.popleft().result()
        self._look_ahead()
        return taken

    def close(self) -> None:
        """Prepare nothing more."""
        self._slices.clear()
        self._coming.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _look_ahead(self) -> None:
        while self._thread is not None and self._slices and len(self._coming) < PARTS_AHEAD:
            run = contextvars.copy_context().run
            self._coming.append(self._thread.submit(run, self._prepare, self._slices.popleft()))
