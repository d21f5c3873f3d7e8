"""Batches beside the requests of a server: lines are answered by its own routes in this process, when there is time."""

import asyncio
import contextlib
import sqlite3
from typing import Any

import msgspec
from starlette.types import ASGIApp

from quire.entrypoints.batches.protocol import (
    MALFORMED,
    BatchError,
    BatchRequest,
    BatchResponse,
    BatchResult,
    decode_request,
)
from quire.entrypoints.batches.runner import IDLE_LOOK_S, BatchRunner, Load, Window
from quire.entrypoints.batches.service import Batches
from quire.entrypoints.http.call import call_app
from quire.entrypoints.http.state import ServerState
from quire.errors import EngineDeadError
from quire.logger import init_logger
from quire.metrics.events import EventKind

logger = init_logger(__name__)
RETRY_S = 0.2
"""Until a line is tried again that found the queue full."""
TRY_AGAIN_S = 5.0
"""Until the store is tried again that could not be written."""


class _Refusal(msgspec.Struct):
    error: dict[str, Any] = {}


class LineAnswerer:
    """Answers a line by the server's application.

    Args:
        app: the application around `state`.
        api_key: a key that opens its routes, if keys are needed.

    Attributes:
        num_asked: lines that the application works on now.
    """

    def __init__(self, app: ASGIApp, state: ServerState, api_key: str | None = None) -> None:
        self._app = app
        self._state = state
        self._api_key = api_key
        self._running = 0
        self.num_asked = 0

    async def answer(self, line: bytes) -> BatchResult:
        """The result of a line that was checked.
        Raises EngineDeadError: the engine has died, or the server ends; the line was not answered."""
        self._running += 1
        try:
            return await self._ask(decode_request(line))
        finally:
            self._running -= 1

    async def _ask(self, request: BatchRequest) -> BatchResult:
        while True:
            self.num_asked += 1
            try:
                answer = await call_app(self._app, "POST", request.url, bytes(request.body), self._api_key)
            finally:
                self.num_asked -= 1
            if answer.status >= 500 and self._is_ending:
                raise EngineDeadError("The engine has died; started again, the batch goes on where it stopped.")
            if answer.status != 429 or (self._running < 2 and not self._state.in_flight):
                break
            await asyncio.sleep(RETRY_S)  # others are in the queue, and leave it
        body, error = answer.body, None
        if answer.status >= 400:
            detail: dict[str, Any] = {}
            with contextlib.suppress(*MALFORMED):
                detail = msgspec.json.decode(body, type=_Refusal).error
            message = str(detail.get("message") or f"status {answer.status}")
            error = BatchError(str(detail.get("code") or answer.status), message)
        if not body.startswith((b"{", b"[")):
            body = msgspec.json.encode({"text": body.decode("utf-8", "replace")})
        response = BatchResponse(answer.status, answer.headers.get("x-request-id", ""), msgspec.Raw(body))
        return BatchResult(custom_id=request.custom_id, response=response, error=error)

    @property
    def _is_ending(self) -> bool:
        engine = self._state.engine_or_none
        return self._state.draining or engine is None or engine.errored


def num_lines_at_once(max_num_seqs: int) -> int:
    """The most lines that run beside requests: an eighth of the rows is left for those, so that they need not wait."""
    return max(1, max_num_seqs - max(1, max_num_seqs // 8))


async def serve_batches(app: ASGIApp, state: ServerState, batches: Batches) -> None:
    """Run the batches until the server ends; once the engine is there and no other process runs them."""
    while not state.draining:
        try:
            if state.engine_or_none is None or not batches.folder.lock():
                await asyncio.sleep(IDLE_LOOK_S)
                continue
            batches.runner = _build_runner(app, state, batches)
            await batches.runner.run()
        except EngineDeadError as error:
            logger.error("Batches stop: %s", error)
            while state.engine.errored:
                await asyncio.sleep(TRY_AGAIN_S)
        except (sqlite3.Error, OSError) as error:
            logger.error("Batches stop for %.0f s: batch_store cannot be used: %s", TRY_AGAIN_S, error)
            await asyncio.sleep(TRY_AGAIN_S)
        except Exception:
            logger.exception("Batches stop for %.0f s.", TRY_AGAIN_S)
            await asyncio.sleep(TRY_AGAIN_S)


def _build_runner(app: ASGIApp, state: ServerState, batches: Batches) -> BatchRunner:
    engine: Any = state.engine
    answerer = LineAnswerer(app, state, batches.api_key)

    async def load() -> Load:
        if not engine.metrics.num_waiting:
            return Load(False, False)
        return Load(True, await _num_in_flight(state) > answerer.num_asked)

    async def answer(line: bytes) -> BatchResult:
        result = await answerer.answer(line)
        engine.metrics.batch_lines["completed" if result.error is None else "failed"] += 1
        return result

    def on_event(text: str) -> None:
        logger.info("Batch %s", text)
        engine.events.add(EventKind.BATCH, text)

    return BatchRunner(
        batches.store,
        answer,
        Window(num_lines_at_once(engine.config.scheduler.max_num_seqs)),
        batches.closed,
        state.settings.max_body_bytes,
        load=load,
        is_ending=lambda: state.draining,
        on_event=on_event,
    )


async def _num_in_flight(state: ServerState) -> int:
    """Requests for work in all processes of this server."""
    others = [] if state.siblings is None else await state.siblings.ask("/load")
    return state.in_flight + sum(msgspec.json.decode(answer)["server_load"] for answer in others)
