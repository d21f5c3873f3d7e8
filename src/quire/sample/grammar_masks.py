"""Which tokens the grammars of a step's rows leave: one bit mask a row, made on the host, for the rows that have a grammar.

Whatever else forbids tokens to such a row is worked into its mask, so that a row with nothing left is found without a look
at logits. Knows tokens and positions. What a grammar is, is its maker's business.

Legend: N rows with a grammar, W words of 32 tokens, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.sample.constraints import NOTHING_LEFT, RowConstraints
from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]


class Filling(Protocol):
    """Masks that are being made: the line of each row's mask, and how many lines are used."""

    line_N: list[int]
    num_lines: int

    def finish(self) -> dict[int, str]:
        """Wait until they are made; errors by index into the rows, whose masks mean nothing."""
        ...


class GrammarSource(Protocol):
    """Who compiles grammars and follows rows through them.

    Attributes:
        jumps: whether tokens that are certain are to be asked for (`forced`).
    """

    jumps: bool

    def start(self, params: SamplingParams) -> Any:
        """What `fill` wants to know of a new row with `structured_outputs`; does not wait."""
        ...

    def forced(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> dict[int, list[int]]:
        """The tokens that follow such rows' outputs for certain, by index, of those where any do."""
        ...

    def room(self, row: Any, output_token_ids: Sequence[int], token_ids: list[int]) -> int:
        """How many of these tokens may follow such a row's output one after the other."""
        ...

    def begin_fill(
        self, rows: Sequence[tuple[Any, Sequence[int]]], masks_NW: IntArray, alone: Collection[int] | None = None
    ) -> Filling:
        """The tokens that may come next, one bit each, for rows that `start` made, each with its whole output. Other threads
        do the work while the caller goes on; only one at a time is being filled. Rows share a mask, but those of `alone`."""
        ...


class GrammarMasks:
    """The masks of a step's rows with a grammar, made while the caller does something else.

    Args:
        rows: (index in the batch, position, constraints) of those with a grammar.
        masks_NW: gets the masks.

    Attributes:
        rows: as given.
        index_N, line_N: for each of these rows its index in the batch, and the line of its mask.
        num_lines: lines that are used.
    """

    def __init__(self, source: GrammarSource, rows: list[tuple[int, int, RowConstraints]], masks_NW: IntArray) -> None:
        self.masks_NW = masks_NW
        self.index_N = [index for index, _, _ in rows]
        self._narrowed = [number for number, (_, _, entry) in enumerate(rows) if entry.narrows_grammar]
        self.rows = rows
        outputs = [(entry.grammar, entry.output) for _, _, entry in rows]
        self._filling = source.begin_fill(outputs, masks_NW, frozenset(self._narrowed))
        self.line_N, self.num_lines = self._filling.line_N, self._filling.num_lines

    def finish(self) -> dict[int, str]:
        """Wait for the masks, and take from them what else is forbidden. Errors by index in the batch; such a row may draw
        anything."""
        found = self._filling.finish()
        errors = {self.index_N[number]: message for number, message in found.items()}
        for number in found:
            self.masks_NW[self.line_N[number]] = -1
        for number in self._narrowed:
            if number not in found:
                index, position, constraints = self.rows[number]
                mask_W = self.masks_NW[self.line_N[number]]
                _forbid(mask_W, position, constraints)
                if not mask_W.any():
                    errors[index] = NOTHING_LEFT
        return errors


def _forbid(mask_W: IntArray, position: int, constraints: RowConstraints) -> None:
    """Take from a mask what the row's other constraints forbid. The end of sequence is kept from a row with `min_tokens`
    only while the grammar leaves something else: a text that is complete ends. A token that is forced is all that is left."""
    if (token_id := constraints.forced(position)) is not None:
        mask_W[:] = 0
        _set_bits(mask_W, np.array([token_id], dtype=np.int64))
        return
    if len(constraints.allowed):
        allowed_W = np.zeros_like(mask_W)
        _set_bits(allowed_W, constraints.allowed)
        mask_W &= allowed_W
    for banned in constraints.banned(position):
        _clear_bits(mask_W, banned)
    if position < constraints.min_position and len(constraints.grammar_ends):
        without_W = mask_W.copy()
        _clear_bits(without_W, constraints.grammar_ends)
        if without_W.any():
            mask_W[:] = without_W


def _set_bits(mask_W: IntArray, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_or.at(mask_W.view(np.uint32), ids >> 5, _bits(ids))


def _clear_bits(mask_W: IntArray, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_and.at(mask_W.view(np.uint32), ids >> 5, ~_bits(ids))


def _bits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
