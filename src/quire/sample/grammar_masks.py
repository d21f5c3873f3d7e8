"""Which tokens the grammars of a step's rows leave: one bit mask a row, made on the host, for the rows that have a grammar.

Whatever else forbids tokens to such a row is worked into its mask, so that a row with nothing left is found without a look
at logits. Knows tokens and positions. What a grammar is, is its maker's business.

Legend: N rows with a grammar, W words of 32 tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.sample.constraints import NOTHING_LEFT, RowConstraints
from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]


class GrammarSource(Protocol):
    """Who compiles grammars and follows rows through them."""

    def start(self, params: SamplingParams) -> Any:
        """What `fill` wants to know of a new row with `structured_outputs`; does not wait."""
        ...

    def fill(self, rows: Sequence[tuple[Any, Sequence[int]]], masks_NW: IntArray) -> dict[int, str]:
        """The tokens that may come next, one bit each, for rows that `start` made, each with its whole output; errors by
        index."""
        ...


@dataclasses.dataclass(slots=True)
class GrammarMasks:
    """A step's masks: `index_N` in the batch, int32 words `masks_NW`, and errors by index in the batch."""

    index_N: list[int]
    masks_NW: IntArray
    errors: dict[int, str]


def fill_grammar_masks(
    source: GrammarSource, rows: list[tuple[int, int, RowConstraints]], vocab_size: int
) -> GrammarMasks:
    """`rows`: (index in the batch, position, constraints) of those with a grammar."""
    masks_NW = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    found = source.fill([(constraints.grammar, constraints.output) for _, _, constraints in rows], masks_NW)
    errors = {rows[number][0]: message for number, message in found.items()}
    for number, (index, position, constraints) in enumerate(rows):
        if index in errors:
            masks_NW[number] = -1
        else:
            _forbid(masks_NW[number], position, constraints)
            if not masks_NW[number].any():
                errors[index] = NOTHING_LEFT
    return GrammarMasks([index for index, _, _ in rows], masks_NW, errors)


def unpack_mask(mask_W: IntArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[V]: whether a token may come next."""
    return np.unpackbits(mask_W.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _forbid(mask_W: IntArray, position: int, constraints: RowConstraints) -> None:
    """Take from a mask what the row's other constraints forbid. The end of sequence is kept from a row with `min_tokens`
    only while the grammar leaves something else: a text that is complete ends."""
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
