"""Running requests as their reader sees them: the reader is called when there is something new, and takes what has
come since it last did.

Nothing queues up here. A reader that is slow, or not called for a while, finds everything in what it takes next.
"""

import abc
import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from quire.engine.request_record import RequestRecord
from quire.outputs import AnyOutput


class OutputStream(abc.ABC):
    """What an engine gives for one request, or several. Belongs to an event loop, and must be closed.

    Attributes:
        take_text: new text, maybe none, of a request with one sequence, once an output of it was taken and while that text is
            all there is to tell; None otherwise: `take` says.
        is_over: the last output was taken.
    """

    take_text: Callable[[], str | None]
    is_over = False

    @abc.abstractmethod
    def push_to(self, on_output: Callable[[], None]) -> None:
        """From now on call this when there may be something to take, in the event loop; maybe more often than there is."""

    @abc.abstractmethod
    def take(self) -> AnyOutput | None:
        """What there is to tell since the last time; None when that is nothing.
        Raises QuireError: the core refused the request, or died."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop reading: what has not ended is aborted."""

    async def next(self) -> AnyOutput:
        """Wait for the next output. Raises as `take`."""
        event = asyncio.Event()
        self.push_to(event.set)
        while (output := self.take()) is None:
            event.clear()
            await event.wait()
        return output

    async def outputs(self) -> AsyncGenerator[AnyOutput, None]:
        """The outputs to the last one, as they come; ends with the stream closed. Raises as `take`."""
        try:
            while not self.is_over:
                yield await self.next()
        finally:
            self.close()


class RequestStream(OutputStream):
    """One request.

    Args:
        record: the request's.
        abort: tells the engine that the reader has stopped.

    Attributes:
        timer: ends the request when its time is over.
    """

    def __init__(self, record: RequestRecord, abort: Callable[[list[str]], None]) -> None:
        self.record = record
        self._abort = abort
        self.timer: asyncio.TimerHandle | None = None
        self.take_text = record.sequences[0].take_text if len(record.sequences) == 1 else no_text

    def push_to(self, on_output: Callable[[], None]) -> None:
        self.record.notify = on_output

    def take(self) -> AnyOutput | None:
        record = self.record
        if record.refusal is not None:
            raise record.refusal
        output = record.build_output()
        if output is None:
            if record.death is not None:
                raise record.death
            return None
        self.is_over = output.finished
        return output

    def close(self) -> None:
        self.record.notify = None
        if self.timer is not None:
            self.timer.cancel()
        if not self.record.is_finished:
            self._abort([self.record.request_id])


class MergedStream(OutputStream):
    """Several requests; outputs tell by their ids whose they are. One that fails fails them all."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = list(streams)
        self.take_text = no_text

    def push_to(self, on_output: Callable[[], None]) -> None:
        for stream in self._streams:
            stream.push_to(on_output)

    def take(self) -> AnyOutput | None:
        output = next((output for stream in self._streams if (output := stream.take()) is not None), None)
        self.is_over = all(stream.is_over for stream in self._streams)
        return output

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def no_text() -> str | None:
    """The `take_text` of a stream that has more to tell than text."""
