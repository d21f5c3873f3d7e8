"""Rows of a step, and where they stand in their grammars: what they have said is taken in, and their masks are begun.

Knows tokens and lines of masks. What a matcher is stands in `backend`; who compiles, in `grammars`.
"""

import concurrent.futures
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from quire.config import limits
from quire.errors import RequestError
from quire.sampling_params import Thinking
from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.filling import FillThread, Job


class RowGrammar:
    """Where one row's output stands in its grammar, which may still be being compiled, and which a row that thinks first
    meets later.

    Attributes:
        backend, matcher: the engine, and its view of the row; None until the grammar is met.
        num_consumed: tokens of the output that were looked at.
        refused: the token with which the output left the grammar.
    """

    __slots__ = ("_compiled", "_thinking", "backend", "matcher", "num_consumed", "refused")

    def __init__(
        self, compiled: "concurrent.futures.Future[tuple[Backend, Any]]", thinking: Thinking | None = None
    ) -> None:
        self._compiled = compiled
        self._thinking = thinking
        self.backend: Backend | None = None
        self.matcher: Any = None
        self.num_consumed = 0
        self.refused: int | None = None

    def may_begin_to_think(self, output_token_ids: Sequence[int]) -> int | None:
        """The token that would begin it."""
        return None if self._thinking is None or output_token_ids else self._thinking.start

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
        """Take in what is new of a row's whole output; whether the row has met its grammar, and does not think any more.

        Raises:
            RequestError: the grammar does not compile.
        """
        if self._thinks(output_token_ids):
            return False
        if self.backend is None:
            self.backend, form = result_of(self._compiled)
            self.matcher = self.backend.begin(form)
        new = output_token_ids[self.num_consumed :]
        self.num_consumed += len(new)
        for token_id in new:
            if self.refused is None and not self.backend.advance([(self.matcher, token_id)])[0]:
                self.refused = token_id
        return True

    @property
    def is_following(self) -> bool:
        """Whether only tokens are to come, which its matcher takes."""
        return self.matcher is not None and self._thinking is None and self.refused is None


class Filling:
    """Masks that are being made in other threads.

    Args:
        rows: all of them.
        alone: rows that share their mask with no other; None: nobody does, and row i has line i.
        free: rows that may say anything.
        openings: (row, token allowed besides).
        errors: what is wrong already, by row.

    Attributes:
        line_N: the line of each row's mask.
        num_lines: lines that are used.
    """

    def __init__(
        self,
        rows: Sequence[tuple[RowGrammar, Sequence[int]]],
        alone: Collection[int] | None,
        free: set[int],
        openings: list[tuple[int, int]],
        errors: dict[int, str],
        masks_NW: IntArray,
        thread: FillThread,
    ) -> None:
        self._openings, self._errors, self._masks_NW = openings, errors, masks_NW
        self.line_N: list[int] = []
        self.num_lines = 0
        self._wanted: dict[Backend, list[tuple[Any, int]]] = {}
        self._row_of: dict[int, int] = {}
        shared: dict[Any, int] = {}
        for index, (row, _) in enumerate(rows):
            key: Any = None
            if index in free:
                key = "free"
            elif row.refused is not None:
                errors[index] = f"the output left its grammar with token {row.refused}"
            elif row.backend is not None and index not in errors:
                key = row.backend.known(row.matcher)
            if key is not None and alone is not None and index not in alone:
                line = shared.setdefault(key, self.num_lines)
                if line < self.num_lines:
                    self.line_N.append(line)
                    continue
            self._begin_line(row, index, index in free, index in errors)
        self._jobs: list[Job] = [
            thread.begin(functools.partial(backend.fill, wanted, masks_NW)) for backend, wanted in self._wanted.items()
        ]

    def _begin_line(self, row: RowGrammar, index: int, is_free: bool, is_wrong: bool) -> None:
        """A line of its own for a row, or for the first of several that share it."""
        line = self.num_lines
        self.num_lines += 1
        self.line_N.append(line)
        if is_free or is_wrong or row.backend is None:
            self._masks_NW[line] = -1
        else:
            self._wanted.setdefault(row.backend, []).append((row.matcher, line))
            self._row_of[line] = index

    def finish(self) -> dict[int, str]:
        """Wait until they are made: what is wrong, by row. Such a row's line means nothing, and is nobody else's."""
        for job in self._jobs:
            job.finish()
        for backend, wanted in self._wanted.items():
            for line, why in backend.settle(wanted, self._masks_NW).items():
                self._errors[self._row_of[line]] = f"the grammar cannot be followed further: {why}"
        for index, token_id in self._openings:
            self._masks_NW.view(np.uint32)[self.line_N[index], token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return self._errors


def result_of(compiled: "concurrent.futures.Future[tuple[Backend, Any]]") -> tuple[Backend, Any]:
    """A form and its engine, once it is compiled.

    Raises:
        RequestError: it does not compile, or not in time.
    """
    try:
        return compiled.result(limits.MAX_GRAMMAR_SECONDS)
    except concurrent.futures.TimeoutError:
        raise RequestError(
            f"the grammar takes longer than {limits.MAX_GRAMMAR_SECONDS} s to compile; use a smaller one",
            param="structured_outputs",
        ) from None
