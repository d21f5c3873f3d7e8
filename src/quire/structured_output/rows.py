"""Rows of a step: each follows its output through its grammar, and its mask is begun.

Knows tokens and lines of masks. `states` knows the state of a row's grammar, and which masks are known there.
"""

import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from quire.config import limits
from quire.errors import RequestError
from quire.sampling_params import Thinking
from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.states import Position, States


class Job:
    """Something that is being done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """In the thread."""
        self._begun.release()
        try:
            self._work()
        except BaseException as error:  # `finish` raises it
            self._error = error
        finally:
            self._done.release()

    def wait_until_begun(self) -> None:
        """Once."""
        self._begun.acquire()

    def finish(self) -> None:
        """Wait for its end, once; raises what it raised."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class FillThread:
    """Does one job after the other. The thread starts with the first and ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> Job:
        """Returns when the work has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-masks", daemon=True)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        job.wait_until_begun()
        return job

    def _run(self) -> None:
        while True:
            self._jobs.get().run()


_MOST_PENDING = 256
"""Tokens that a row's matcher may be behind, lest catching up take long some day."""
_READING_S = 120.0
"""How long the vocabulary may take, which the first grammar waits for."""
Rows = Sequence[tuple["RowGrammar", Sequence[int]]]
"""Rows, each with its whole output so far."""


class RowGrammar:
    """One row's way through its grammar. The grammar may still be being compiled; a row that thinks first meets it later.

    Attributes:
        at: its place; None until the grammar is met.
        num_consumed: tokens of the output that were looked at.
        refused: the token with which the output left the grammar.
        error: what is wrong with the grammar itself.
    """

    __slots__ = ("_compiled", "_is_met", "_thinking", "at", "error", "num_consumed", "refused")

    def __init__(self, compiled: "concurrent.futures.Future[States]", thinking: Thinking | None = None) -> None:
        self._compiled = compiled
        self._thinking = thinking
        self._is_met = False
        self.at: Position | None = None
        self.num_consumed = 0
        self.refused: int | None = None
        self.error = ""

    def next_of_opening(self, output_token_ids: Sequence[int]) -> int | None:
        """The next token of the marker with which the row may begin to think, while the output is the beginning of it."""
        opening = [] if self._thinking is None else self._thinking.opening
        count = len(output_token_ids)
        return opening[count] if count < len(opening) and list(output_token_ids) == opening[:count] else None

    def _thinks(self, output_token_ids: Sequence[int]) -> bool:
        thinking = self._thinking
        if thinking is None or (thinking.start is not None and not output_token_ids):
            return False
        if thinking.start is not None and output_token_ids[0] != thinking.start:
            self._thinking = None
            return False
        while self.num_consumed < len(output_token_ids):
            self.num_consumed += 1
            begin = max(0, self.num_consumed - len(thinking.end))
            if list(output_token_ids[begin : self.num_consumed]) == thinking.end:
                self._thinking = None
                return False
        return True

    def follow(self, output_token_ids: Sequence[int]) -> bool:
        """Take in what is new of a row's whole output; whether its grammar says what may come next: it has met it, does not think
        any more, and nothing is wrong."""
        if self._is_met and self.num_consumed == len(output_token_ids):
            return True
        if self.error or self._thinks(output_token_ids):
            return False
        at = self.at
        if at is None:
            try:
                at = self.at = Position(result_of(self._compiled))
            except Exception as error:  # whatever a compilation raises ends its own rows alone
                self.error = f"{type(error).__name__}: {error}"
                return False
        while self.refused is None and self.num_consumed < len(output_token_ids):
            token_id = output_token_ids[self.num_consumed]
            self.num_consumed += 1
            if not at.states.take(at, token_id):
                self.refused = token_id
                self.error = f"the output left its grammar with token {token_id}"
        self._is_met = self._thinking is None and not self.error
        return not self.error


class Filling:
    """Masks of rows; those that are not known are being made in other threads.

    Args:
        rows: all of them.
        alone: rows that share their mask with no other; None: no row shares, and row i has line i.

    Attributes:
        line_N: the line of each row's mask.
        num_lines: lines that are used.
    """

    def __init__(self, rows: Rows, alone: Collection[int] | None, masks_NW: IntArray, thread: FillThread) -> None:
        self._masks_NW = masks_NW
        self.line_N: list[int] = []
        self._openings: list[tuple[int, int]] = []
        self._errors: dict[int, str] = {}
        self._unknown: list[tuple[int, Position]] = []
        late: list[Position] = []
        lines: dict[Any, int] = {}
        num_lines = 0
        for index, (row, output_token_ids) in enumerate(rows):
            key: Any = None
            mask_W: Any = -1
            if row.follow(output_token_ids):
                at = row.at
                assert at is not None
                mask_W = at.states.mask(at)
                key = (id(at.node), at.used) if mask_W is None else id(mask_W)
                if not output_token_ids and (token_id := row.next_of_opening(output_token_ids)) is not None:
                    self._openings.append((index, token_id))
                    key = -1 - index
                if len(at.pending) > _MOST_PENDING:
                    late.append(at)
            elif not row.error and (token_id := row.next_of_opening(output_token_ids)) is not None:
                mask_W, key = 0, -1 - index
                self._openings.append((index, token_id))
            elif row.error:
                self._errors[index] = row.error
                key = -1 - index
            if alone is None or index in alone:
                key = -1 - index
            line = lines.setdefault(key, num_lines)
            self.line_N.append(line)
            if line == num_lines:
                num_lines += 1
                if mask_W is None:
                    assert row.at is not None
                    self._unknown.append((line, row.at))
                else:
                    masks_NW[line] = mask_W
        self.num_lines = num_lines
        self._jobs: list[Job] = []
        if self._unknown or late:
            self._jobs.append(thread.begin(functools.partial(self._make, late)))

    def _make(self, late: list[Position]) -> None:
        """In the other thread."""
        moves: dict[Backend, list[tuple[Any, list[int]]]] = {}
        wanted: dict[Backend, list[tuple[Any, int]]] = {}
        for line, at in (*self._unknown, *((-1, at) for at in late)):
            backend = at.states.backend
            matcher, token_ids = at.states.give_pending(at)
            if token_ids:
                moves.setdefault(backend, []).append((matcher, token_ids))
            if line >= 0:
                wanted.setdefault(backend, []).append((matcher, line))
        for backend, batch in moves.items():
            backend.take_all(batch)
        for backend, batch in wanted.items():
            backend.fill(batch, self._masks_NW)

    def finish(self) -> dict[int, str]:
        """Wait until they are made. Returns what is wrong, by row: such a row's line means nothing, and no other row has it."""
        for job in self._jobs:
            job.finish()
        for line, at in self._unknown:
            if why := at.states.learn(at, self._masks_NW[line]):
                stuck = f"the grammar cannot be followed further: {why}"
                self._errors |= {index: stuck for index, other in enumerate(self.line_N) if other == line}
        for index, token_id in self._openings:
            self._masks_NW.view(np.uint32)[self.line_N[index], token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return self._errors


def result_of(compiled: "concurrent.futures.Future[States]") -> States:
    """A grammar's states, once it is compiled.

    Raises:
        RequestError: it does not compile, or not in time.
    """
    try:
        return compiled.result(limits.MAX_GRAMMAR_SECONDS + _READING_S)
    except concurrent.futures.TimeoutError:
        message = f"the grammar takes longer than {limits.MAX_GRAMMAR_SECONDS} s to compile; use a smaller one"
        raise RequestError(message, param="structured_outputs") from None
