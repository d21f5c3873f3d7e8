"""One running request as its reader sees it: called when there is news, it takes what has come since it last did.

Nothing queues up here. A reader that is slow, or not called for a while, finds everything in what it takes next.
"""

import asyncio
from collections.abc import Callable

from quire.engine.request_state import RequestRecord
from quire.errors import EngineDeadError
from quire.outputs import AnyOutput


class RequestStream:
    """What an engine gives for a request that it has queued. Belongs to the event loop.

    Args:
        record: the request's.
        abort: tells the engine that nobody reads on.
        why_dead: the engine's death, once it has died.
    """

    __slots__ = ("_abort", "_event", "_only", "_why_dead", "record")

    def __init__(
        self, record: RequestRecord, abort: Callable[[list[str]], None], why_dead: Callable[[], EngineDeadError | None]
    ) -> None:
        self.record = record
        self._abort = abort
        self._why_dead = why_dead
        self._event = asyncio.Event()
        self._only = record.sequences[0] if len(record.sequences) == 1 and record.sequences[0].is_plain else None
        record.notify = self._event.set

    def push_to(self, on_news: Callable[[], None]) -> None:
        """From now on call this when there may be something to take: in the event loop. It must not raise."""
        self.record.notify = on_news

    async def next(self) -> AnyOutput:
        """Wait for the next output.

        Raises:
            QuireError: the core refused the request, or died.
        """
        while (output := self.take()) is None:
            self._event.clear()
            await self._event.wait()
        return output

    def take(self) -> AnyOutput | None:
        """What there is to tell since the last time; None when that is nothing.

        Raises:
            QuireError: the core refused the request, or died.
        """
        record = self.record
        if record.refusal is not None:
            raise record.refusal
        output = record.build_output()
        if output is None and (dead := self._why_dead()) is not None:
            raise dead
        return output

    def take_text(self) -> tuple[str, list[int]] | None:
        """New text and its tokens, of a request with one sequence, where that is all there is to tell; None where there is
        something else, or nothing: `take` says."""
        only = self._only
        return None if only is None or self._why_dead() is not None else only.take_text()

    def close(self) -> None:
        """Nobody reads on: a request that has not ended is aborted."""
        if not self.record.is_finished:
            self._abort([self.record.request_id])
