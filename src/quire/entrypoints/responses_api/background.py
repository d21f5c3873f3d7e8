"""Responses that are made while nobody waits; whoever asks gets their events from any place on.

Knows one response's life. Memory: a running response's events are kept whole, about 250 bytes a token, until it ends.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.responses_api.prepare import ResponseJob
from quire.entrypoints.responses_api.run import ResponseStream, cancel, end, fail, keep
from quire.logger import init_logger
from quire.outputs import RequestOutput

logger = init_logger(__name__)


class BackgroundRun:
    """A response in the making, which a draining server waits for; in `state.background` until it is over and kept."""

    def __init__(self, state: ServerState, job: ResponseJob) -> None:
        self.job = job
        self._state = state
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._is_over = False
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    @property
    def has_stream(self) -> bool:
        """Whether its events may be asked for."""
        return bool(self.job.request.stream)

    async def start(self) -> None:
        """Keep the response as one that waits, and begin."""
        await keep(self._state, self.job)
        self._state.background[self.job.response.id] = self
        self._state.begin_request()
        self._task = asyncio.ensure_future(self._run())
        await asyncio.sleep(0)  # a task that is cancelled before it has begun would not end what was begun here

    async def cancel(self) -> None:
        """Stop, unless it is over; returns when it is."""
        assert self._task is not None
        if not self.job.is_over:
            self._is_cancelled = True
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one with number `after`, as they come."""
        position = after + 1
        while True:
            if position < len(self._events):
                events, position = self._events[position:], len(self._events)
                yield b"".join(events)
            elif self._is_over:
                yield b""
                return
            else:
                await self._news.wait()

    async def _run(self) -> None:
        try:
            self._add([self.job.writer.lifecycle("created"), self.job.writer.lifecycle("queued")])
            await self._end(await self._generate())
        except Exception:
            logger.exception("Response %s could not be kept.", self.job.request_id)
        finally:
            self._is_over = True
            self._wake()
            del self._state.background[self.job.response.id]
            self._state.end_request()

    async def _generate(self) -> list[bytes]:
        """Add events but the last, which are returned."""
        stream = ResponseStream(self._state, self.job)
        try:
            async with aclosing((await stream.open()).outputs()) as outputs:
                async for output in outputs:
                    assert isinstance(output, RequestOutput)
                    self._add(stream.events(output))
            return end(self.job)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            return cancel(self.job)
        except Exception as error:
            return fail(self.job, error)

    async def _end(self, events: list[bytes]) -> None:
        """The last events are told when the response has been kept."""
        await keep(self._state, self.job, [*self._events, *events] if self.has_stream else None)
        self._add(events)

    def _add(self, events: list[bytes]) -> None:
        if self.has_stream:
            self._events += events
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
