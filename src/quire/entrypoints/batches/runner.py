"""Answers the lines of batches, and takes each batch from state to state.

One loop does everything in turns: it looks at the batches, starts lines, and writes down the results that have come. A line
counts as running until its result is on the disk. Whenever the loop ends, what has no result there is answered by the next one.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from typing import NamedTuple

from quire.entrypoints.batches.protocol import BatchResult, Line, LineChecker, LineFault
from quire.entrypoints.batches.store import BatchRow, BatchStore, LineKey

LOOK_S = 0.1
"""Seconds between two looks at the engine's queue while lines run."""
IDLE_LOOK_S = 1.0
"""Seconds between two looks at the batches while there is none."""
READ_AHEAD = 256
"""Lines whose numbers are read at once."""
VALIDATED_AT_ONCE = 500
VALIDATED_BYTES = 4 << 20
MAX_FAULTS = 100
"""Faults that a refused batch lists."""
REMOVE_OLD_S = 600.0


class Load(NamedTuple):
    """What the engine does besides.

    Attributes:
        is_waiting: requests are in its queue.
        is_online: some of its requests are no lines of batches.
    """

    is_waiting: bool
    is_online: bool


class Window:
    """How many lines may run: all that fit while nothing waits in the engine's queue; fewer and fewer while something waits
    that is no line of a batch.

    Args:
        limit: the most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.size = limit

    def look(self, load: Load, num_running: int) -> None:
        """Adjust the size, a few times a second."""
        if not load.is_waiting:
            self.size = min(self._limit, self.size + max(1, self._limit // 16))
        elif load.is_online:
            self.size = min(self.size, num_running) // 2
        else:
            self.size = max(1, min(self.size, num_running))


async def _no_load() -> Load:
    return Load(False, False)


class BatchRunner:
    """Runs the batches of a store.

    Args:
        answer: gives the result of a line. What it raises ends the run.
        window: how many lines may run.
        closed: paths that lines may not have.
        max_line_bytes: the longest line.
        load: asked a few times a second how busy the engine is.
        is_ending: whether the process ends; then lines are given up, and the run is over.
        on_event: told when a batch begins and ends.
        on_result: called for each result that is on the disk.
    """

    def __init__(
        self,
        store: BatchStore,
        answer: Callable[[bytes], Awaitable[BatchResult]],
        window: Window,
        closed: Container[str],
        max_line_bytes: int,
        *,
        load: Callable[[], Awaitable[Load]] = _no_load,
        is_ending: Callable[[], bool] = lambda: False,
        on_event: Callable[[str], object] = lambda text: None,
        on_result: Callable[[BatchResult], object] = lambda result: None,
    ) -> None:
        self._store = store
        self._answer = answer
        self._window = window
        self._closed = closed
        self._max_line_bytes = max_line_bytes
        self._load = load
        self._is_ending = is_ending
        self._on_event = on_event
        self._on_result = on_result
        self._news = asyncio.Event()
        self._running: dict[LineKey, asyncio.Task[None]] = {}
        self._results: list[tuple[LineKey, BatchResult]] = []
        self._ready: deque[LineKey] = deque()
        self._validation: tuple[int, asyncio.Task[None]] | None = None

    def wake(self) -> None:
        """Something has changed in the store."""
        self._news.set()

    async def run(self, until_done: bool = False) -> None:
        """Work until the process ends or this is cancelled; or until no batch is left.
        Raises what `answer` raises, and sqlite3.Error or OSError if the store cannot be written."""
        next_look = next_removal = 0.0
        try:
            while not self._is_ending():
                now = time.monotonic()
                if now >= next_removal:
                    next_removal = now + REMOVE_OLD_S
                    await self._store.remove_old()
                if now >= next_look:
                    next_look = now + LOOK_S
                    await self._adjust()
                active = await self._store.active()
                if until_done and not active:
                    return
                changed = [await self._advance(row) for row in active]
                await self._start_lines([row for row in active if row.batch.status == "in_progress"])
                if not any(changed):
                    await self._wait(LOOK_S if active else IDLE_LOOK_S)
                await self._record()
        finally:
            await self._give_up()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    async def _adjust(self) -> None:
        """Look how busy the engine is; lines above the window go back, the youngest first."""
        self._window.look(await self._load(), len(self._running))
        for key in list(self._running)[self._window.size :]:
            self._running[key].cancel()

    async def _advance(self, row: BatchRow) -> bool:
        """Take a batch to its next state; whether it has one now."""
        batch = row.batch
        if batch.status == "validating":
            if self._validation is None:
                self._validation = row.number, asyncio.create_task(self._read_file(row))
                self._validation[1].add_done_callback(lambda task: self._news.set())
            return False
        if batch.status == "in_progress":
            if row.num_unanswered and not self._has_expired(row):
                return False
            await self._store.finalize(row)
            return True
        tasks = [task for key, task in self._running.items() if key[0] == row.number]
        if self._validation is not None and self._validation[0] == row.number:
            tasks.append(self._validation[1])
        for task in tasks:
            task.cancel()
        self._ready = deque(key for key in self._ready if key[0] != row.number)
        if tasks:
            return False
        over = await self._store.finish(row)
        counts = over.request_counts
        self._on_event(f"{over.id} is {over.status}: {counts.completed} lines answered, {counts.failed} failed")
        return True

    def _has_expired(self, row: BatchRow) -> bool:
        return row.batch.expires_at is not None and self._store.now >= row.batch.expires_at

    async def _start_lines(self, rows: list[BatchRow]) -> None:
        """Fill the window."""
        if sum(row.num_unanswered for row in rows) > len(self._running) and not self._ready:
            found = await self._store.unanswered(len(self._running) + READ_AHEAD)
            self._ready.extend(key for key in found if key not in self._running)
        while self._ready and len(self._running) < self._window.size:
            key = self._ready.popleft()
            task = self._running[key] = asyncio.create_task(self._work(key))
            task.add_done_callback(lambda task: self._news.set())

    async def _work(self, key: LineKey) -> None:
        result = await self._answer(await self._store.request(key))
        self._results.append((key, result))

    async def _record(self) -> None:
        """Write down the results that have come; then their lines do not run any more. Raises what a line raised."""
        results, self._results = self._results, []
        if results:
            await self._store.record(results)
        for key, result in results:
            del self._running[key]
            self._on_result(result)
        ended = {key for key, _ in self._results}  # while the others were written
        for key, task in list(self._running.items()):
            if task.done() and key not in ended:
                del self._running[key]
                if not task.cancelled():
                    task.result()
        if self._validation is not None and self._validation[1].done():
            (_, task), self._validation = self._validation, None
            if not task.cancelled():
                task.result()

    async def _give_up(self) -> None:
        """End what runs; results that have come are kept."""
        tasks = [*self._running.values(), *([] if self._validation is None else [self._validation[1]])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        results, self._results = self._results, []
        if results:
            await self._store.record(results)

    # --- validation ---

    async def _read_file(self, row: BatchRow) -> None:
        await self._store.forget_lines(row)
        checker = LineChecker(self._closed, row.batch.endpoint, self._max_line_bytes)
        faults: list[LineFault] = []
        count = 0
        try:
            with self._store.files.open_content(row.batch.input_file_id) as file:
                async for lines in pieces_of(checker.read(file)):
                    count += len(lines)
                    bad = [line for line in lines if line.error is not None]
                    good = [line for line in lines if line.error is None]
                    bad += await self._store.add_lines(row, good)
                    faults += [_fault_of(line) for line in sorted(bad)]
                    if len(faults) >= MAX_FAULTS:
                        break
        except FileNotFoundError:
            faults = [LineFault(code="file_not_found", message="The input file was deleted.", param="input_file_id")]
        if not count and not faults:
            faults = [LineFault(code="empty_file", message="The input file has no line.", param="input_file_id")]
        if faults:
            await self._store.fail(row, faults[:MAX_FAULTS])
            self._on_event(f"{row.batch.id} failed: {faults[0].message}")
            return
        await self._store.begin(row)
        self._on_event(f"{row.batch.id} begins: {count} lines")


async def pieces_of(lines: Iterator[Line]) -> AsyncIterator[list[Line]]:
    """Lines, some hundreds at a time; read in a thread."""
    while piece := await asyncio.to_thread(_next_piece, lines):
        yield piece


def _next_piece(lines: Iterator[Line]) -> list[Line]:
    piece: list[Line] = []
    size = 0
    for line in itertools.islice(lines, VALIDATED_AT_ONCE):
        piece.append(line)
        size += len(line.text)
        if size >= VALIDATED_BYTES:
            break
    return piece


def _fault_of(line: Line) -> LineFault:
    assert line.error is not None
    return LineFault(code=line.error.code, message=line.error.message, line=line.number)
