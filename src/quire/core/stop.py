"""When a request ends: end of sequence, stop tokens, and limits of length. Stop strings are the frontend's business.

The check of a step is vectorised over rows; only rows that end are looked at one by one.
"""

import numpy as np

from quire.core.output import BoolArray, IntArray
from quire.core.request_state import Request
from quire.request import FinishReason

MAX_VECTOR_IDS = 8
"""Stop ids a row that are compared in the arrays; a request with more is looked up in its own sets."""

_NO_TOKEN = -1


class StopTable:
    """Each row's stop conditions as arrays."""

    def __init__(self, num_rows: int) -> None:
        self._ids: IntArray = np.full((1, num_rows), _NO_TOKEN, dtype=np.int32)
        self._min_total: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._max_total: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._many: dict[int, frozenset[int]] = {}

    def set(self, row: int, request: Request) -> None:
        """The row is this request's from now on."""
        ids = request.eos_ids | request.stop_ids
        self._ids[:, row] = _NO_TOKEN
        self._many.pop(row, None)
        if len(ids) > MAX_VECTOR_IDS:
            self._many[row] = ids
        else:
            if len(ids) > len(self._ids):
                more = np.full((len(ids) - len(self._ids), self._ids.shape[1]), _NO_TOKEN, dtype=np.int32)
                self._ids = np.concatenate([self._ids, more])
            self._ids[: len(ids), row] = sorted(ids)
        self._min_total[row] = request.min_total
        self._max_total[row] = request.max_total

    def check(self, rows: IntArray, token_ids: IntArray, lengths: IntArray) -> BoolArray:
        """Which rows end with the token that brought them to `lengths`."""
        hits: BoolArray = self._ids[0][rows] == token_ids
        for ids in self._ids[1:]:
            hits |= ids[rows] == token_ids
        if self._many:
            for index, row in enumerate(rows.tolist()):
                if row in self._many and int(token_ids[index]) in self._many[row]:
                    hits[index] = True
        if np.count_nonzero(hits):
            hits &= lengths >= self._min_total[rows]
        hits |= lengths >= self._max_total[rows]
        return hits


def until_end(request: Request, token_ids: list[int], length: int) -> tuple[list[int], bool]:
    """What a request of `length` tokens gets of those that follow: all, or up to the one that ends it, and whether one does."""
    for index, token_id in enumerate(token_ids, 1):
        is_stop = token_id in request.eos_ids or token_id in request.stop_ids
        if (is_stop and length + index >= request.min_total) or length + index >= request.max_total:
            return token_ids[:index], True
    return token_ids, False


def compute_finish(request: Request, token_id: int, length: int) -> tuple[FinishReason, int | str | None]:
    """Why a request that ends with this token does: (reason, stop reason). A stopping token wins over a limit."""
    if length >= request.min_total:
        if token_id in request.eos_ids:
            return FinishReason.STOP, None
        if token_id in request.stop_ids:
            return FinishReason.STOP, token_id
    if length < request.max_total:
        return FinishReason.REPETITION, "repetition_detected"
    return FinishReason.LENGTH, None
