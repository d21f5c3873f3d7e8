"""Positions of tokens on several axes, for models that place images in two dimensions (M-RoPE, Wang et al. 2024).

A text token's position is the same on every axis and one more than the largest before it. An image's embeddings begin there,
too, and count frames, rows and columns; a video's frames may be several positions apart, or less than one. The text behind
goes on after the largest of these. So text behind images stands at its place in the request less a number that its row knows.
Knows rows and items; knows no model.

Legend: T tokens of the step, B its requests, R rows, A axes.
"""

from collections.abc import Sequence

import numpy as np

from quire.core.output import IntArray, SchedulerOutput
from quire.media import MediaItem

NUM_AXES = 3


def place(items: Sequence[MediaItem]) -> tuple[IntArray, int]:
    """The positions [tokens, A] of a prompt up to the end of its last item, and what is added to the places of tokens behind."""
    end, shift = max(item.end for item in items), 0
    positions_TA = np.repeat(np.arange(end, dtype=np.int32)[:, None], NUM_AXES, axis=1)
    for item in items:
        axes_TA = np.indices(item.grid, dtype=np.int32).reshape(NUM_AXES, -1).T
        axes_TA[:, 0] = axes_TA[:, 0].astype(np.float32) * np.float32(item.interval)
        positions_TA[item.offset : item.end] = item.offset + shift + axes_TA
        grown = int(axes_TA.max()) + 1 - item.length
        positions_TA[item.end :] += grown
        shift += grown
    return positions_TA, shift


class AxisPositions:
    """Every row's positions.

    Attributes:
        axes_TA: int32; those of the step's tokens.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.axes_TA: IntArray = np.zeros((max_tokens, NUM_AXES), dtype=np.int32)
        self._shift_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self._with_items: dict[int, IntArray] = {}

    def apply_diff(self, plan: SchedulerOutput) -> None:
        """Take in the rows that begin."""
        for request in plan.new_requests:
            self._with_items.pop(request.row, None)
            self._shift_R[request.row] = 0
            if items := [item for item in request.media if item.grid]:
                self._with_items[request.row], self._shift_R[request.row] = place(items)

    def fill(self, plan: SchedulerOutput, positions_T: IntArray) -> None:
        """The positions of a step's tokens, whose places in their requests are `positions_T`."""
        shift_T = np.repeat(self._shift_R[plan.rows], plan.num_scheduled_tokens)
        self.axes_TA[: len(positions_T)] = (positions_T + shift_T)[:, None]
        if not self._with_items:
            return
        at = 0
        for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
            known_TA = self._with_items.get(row)
            if known_TA is not None and (start := int(positions_T[at])) < len(known_TA):
                part_TA = known_TA[start : start + count]
                self.axes_TA[at : at + len(part_TA)] = part_TA
            at += count
