"""The running batch in arrays: what changes for every request in every step, so that a step costs a few vector operations.

A request owns a row from admission to release. The arrays are indexed by row. Knows rows and lengths; takes no decisions.

Lengths of a row, always collected <= computed <= length and known <= length:
    computed     tokens whose keys and values exist once every scheduled step has run
    collected    the same, once every *collected* step has run
    known        tokens whose value the host has seen
    length       known tokens plus placeholders: tokens that steps in flight will sample, or may sample behind drafts
"""

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from quire.core.output import BoolArray, IntArray
from quire.core.request_state import Request, RequestStatus
from quire.core.stop import StopTable
from quire.errors import EngineError


class RunningBatch:
    """Rows and their arrays.

    Args:
        num_rows: requests that may run at once.
        block_size: tokens a page.

    Attributes:
        limit: tokens worth computing: the last token of a request is sampled, never computed.
        capacity: tokens that fit into the row's pages.
        prefill_end: tokens known when the row was given; up to here the row prefills.
        in_flight: steps that name the row and are not collected yet.
        accepts: whether tokens that arrive for the row are wanted.
        num_unwanted: draws in flight of tokens that became known without them.
        is_special: whether the row's next token carries more news than itself.
        tail: the newest known tokens, by position modulo page size; `flush` moves them to the request.
        num_prefilling: rows with computed < prefill_end.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_rows
        self.request_ids: npt.NDArray[np.object_] = np.empty(num_rows, dtype=object)
        self.computed, self.collected, self.known, self.length = (np.zeros(num_rows, np.int32) for _ in range(4))
        self.limit, self.capacity, self.prefill_end = (np.zeros(num_rows, np.int32) for _ in range(3))
        self.in_flight, self.num_unwanted = (np.zeros(num_rows, np.int32) for _ in range(2))
        self.accepts: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.is_special: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.tail: IntArray = np.zeros((num_rows, block_size), dtype=np.int32)
        self.stops = StopTable(num_rows)
        self.num_prefilling = 0
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._ranked: list[tuple[tuple[float, ...], int]] = []
        self._order: IntArray | None = None

    @property
    def num_free_rows(self) -> int:
        """Requests that can be given a row."""
        return len(self._free_rows)

    @property
    def num_active(self) -> int:
        """Rows that take part in scheduling."""
        return len(self._ranked)

    def order(self) -> IntArray:
        """Active rows, lowest rank first. The array is replaced when it changes, never written to."""
        if self._order is None:
            self._order = np.array([row for _, row in self._ranked], dtype=np.int32)
        return self._order

    def lowest_ranked(self) -> Request:
        """The active request that gives way first."""
        return self.request(self._ranked[-1][1])

    def count_partial(self, rows: IntArray, counts: IntArray) -> int:
        """Active prompts that will not be complete after a step that computes `counts` tokens of `rows`; background requests that
        sit it out, so that others come first, do not keep these waiting."""
        order = self.order()
        complete = int((self.computed[rows] + counts >= self.prefill_end[rows]).sum())
        decoding = int((self.computed[order] >= self.prefill_end[order]).sum())
        scheduled_decoding = int((self.computed[rows] >= self.prefill_end[rows]).sum())
        left = order[(self.computed[order] < self.prefill_end[order]) & ~np.isin(order, rows)]
        sitting_out = sum(self.request(row).source.is_background for row in left.tolist())
        return len(order) - complete - (decoding - scheduled_decoding) - sitting_out

    def request(self, row: int) -> Request:
        """Who owns the row."""
        request = self.requests[row]
        if request is None:
            raise EngineError(f"row {row} is nobody's")
        return request

    def add(self, request: Request) -> int:
        """Give a row to a request whose pages are attached and whose `num_computed_tokens` is set."""
        row = self._free_rows.pop()
        num_tokens = len(request.token_ids)
        request.row = row
        request.status = RequestStatus.RUNNING
        self.requests[row] = request
        self.request_ids[row] = request.request_id
        self.computed[row] = self.collected[row] = request.num_computed_tokens
        self.known[row] = self.length[row] = self.prefill_end[row] = num_tokens
        self.limit[row] = request.max_total - 1
        self.capacity[row] = len(request.block_ids[0]) * self.block_size
        self.in_flight[row] = self.num_unwanted[row] = 0
        self.accepts[row] = True
        self.is_special[row] = not request.has_reported or request.tells_more
        self.stops.set(row, request)
        self.num_prefilling += 1
        insort(self._ranked, (request.rank, row))
        self._order = None
        return row

    def deactivate(self, request: Request) -> None:
        """Schedule the row no more; it stays its owner's until `remove`."""
        row = request.row
        index = bisect_left(self._ranked, (request.rank, row))
        if index < len(self._ranked) and self._ranked[index][1] == row:
            del self._ranked[index]
            self._order = None
            if self.computed[row] < self.prefill_end[row]:
                self.num_prefilling -= 1

    def remove(self, request: Request) -> None:
        """Take the row back.

        Raises:
            EngineError: a step in flight still names the row, or it is not this request's.
        """
        row = request.row
        if row < 0 or self.requests[row] is not request or self.in_flight[row]:
            raise EngineError(f"row {row} cannot be taken from {request.request_id}: it is in flight or not its own")
        self.deactivate(request)
        request.num_computed_tokens = int(self.collected[row])
        self.requests[row] = None
        self.request_ids[row] = None
        self.accepts[row] = False
        request.row = -1
        self._free_rows.append(row)

    def flush(self, request: Request) -> None:
        """Move the row's tail to the request's own list of tokens."""
        row, start = request.row, len(request.token_ids)
        count = int(self.known[row]) - start
        if count > 0:
            column = start % self.block_size
            request.token_ids.extend(self.tail[row, column : column + count].tolist())

    def _flush_full(self, rows: IntArray) -> None:
        """`flush` of rows that have filled a page, all at once."""
        for row, known, tail in zip(rows.tolist(), self.known[rows].tolist(), self.tail[rows].tolist(), strict=True):
            token_ids = self.request(row).token_ids
            if known > len(token_ids):
                token_ids.extend(tail[len(token_ids) % self.block_size :])

    def known_since(self, row: int, start: int, most: int) -> list[int]:
        """The row's known tokens from `start` on, at most so many."""
        token_ids = self.request(row).token_ids
        flushed = len(token_ids)
        if start < flushed - most:
            return list(token_ids[start : start + most])
        column = flushed % self.block_size
        tail: list[int] = self.tail[row, column : column + int(self.known[row]) - flushed].tolist()
        if start >= flushed:
            return tail[start - flushed :][:most]
        return [*token_ids[start:], *tail][:most]

    def num_drawing(self, row: int) -> int:
        """Tokens of the row that steps in flight will sample."""
        return int(self.length[row] - self.known[row])

    def jump(self, request: Request, token_ids: list[int]) -> None:
        """Append tokens that need no draw, more than the row's steps in flight sample. They are computed like a prompt's."""
        row = request.row
        self.flush(request)
        request.token_ids.extend(token_ids)
        self.num_unwanted[row] += self.num_drawing(row)
        self.known[row] += len(token_ids)
        self.length[row] = self.known[row]
        if request.status is RequestStatus.RUNNING and self.length[row] - self.computed[row] > 1:
            request.num_computed_tokens = int(self.computed[row])
            self.num_prefilling += int(
                self.computed[row] >= self.prefill_end[row]
            )  # else it does already (`recompute`)
            self.prefill_end[row] = self.length[row]

    def launch(self, rows: IntArray, counts: IntArray, needs_sample: BoolArray) -> tuple[list[int], int]:
        """A step computes `counts` tokens of `rows`, and samples for some of them. Returns the rows that prefill, and the tokens
        of their prompts."""
        computed, prefill_rows, num_prompt_tokens = self.computed[rows], list[int](), 0
        ends = computed + counts
        if self.num_prefilling:
            prefill_end = self.prefill_end[rows]
            is_prefill = computed < prefill_end
            prefill_rows, num_prompt_tokens = rows[is_prefill].tolist(), int(counts[is_prefill].sum())
            self.num_prefilling -= int(np.count_nonzero(is_prefill & (ends >= prefill_end)))
        self.computed[rows] = ends
        self.length[rows] += needs_sample
        self.in_flight[rows] += 1
        return prefill_rows, num_prompt_tokens

    def set_back(self, row: int, num_tokens: int) -> None:
        """The row's last tokens that were scheduled are not what it draws there: they are not computed, and there are no draws
        behind them. No other step in flight names the row."""
        for lengths in (self.computed, self.collected, self.length):
            lengths[row] -= num_tokens

    def recompute(self, row: int, num_tokens: int) -> None:
        """The row's last `num_tokens` computed tokens are computed again, like a prompt's. No other step in flight names the
        row."""
        for lengths in (self.computed, self.collected):
            lengths[row] -= num_tokens
        request = self.request(row)
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = int(self.computed[row])
            self.prefill_end[row] = self.length[row]
            self.num_prefilling += 1

    def extend(self, request: Request, token_ids: list[int]) -> None:
        """Append further tokens that a step drew at once."""
        self.flush(request)
        request.token_ids.extend(token_ids)
        self.known[request.row] += len(token_ids)

    def take_wanted(self, rows: IntArray, token_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Of what rows have drawn, what they want: nothing of rows that accept no more, nor draws that have been awaited."""
        accepts = self.accepts[rows]
        if not accepts.all():
            rows, token_ids = rows[accepts], token_ids[accepts]
        if self.num_unwanted.any():
            wanted = self.num_unwanted[rows] == 0
            self.num_unwanted[rows[~wanted]] -= 1
            rows, token_ids = rows[wanted], token_ids[wanted]
        return rows, token_ids

    def append(self, rows: IntArray, token_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Append one token to each row. Returns the new lengths, and the rows whose page was completed just before.

        Those rows' tails are flushed here, before their first column is written again.
        """
        positions = self.known[rows]
        columns = positions % self.block_size
        full_rows = rows[columns == 0]
        if len(full_rows):
            self._flush_full(full_rows)
        self.tail[rows, columns] = token_ids
        positions += 1
        self.known[rows] = positions
        return positions, full_rows
