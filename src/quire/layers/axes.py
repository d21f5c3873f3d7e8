"""Rotation by positions on several axes: a table of cosines and sines with a row for each token of the step.

Kernels read a row of a table at a token's position; here the row is the token's own, filled once a step for all layers.
Legend: T tokens, A axes, P pairs of a head.
"""

import torch

from quire.kernels.types import Rope as RopeTable
from quire.layers.interface import StepInputs
from quire.models.rope import Rope


class AxisTable:
    """Fills a table of `rotary_table` for ropes with axes.

    Args:
        max_positions: as for other tables.
    """

    def __init__(self, rope: Rope, table: RopeTable, max_positions: int) -> None:
        frequencies_P, self._amplitude = rope.frequencies(max_positions)
        self._cos_sin, device = table.cos_sin, table.cos_sin.device
        self._frequencies_P, self._axes_P = frequencies_P.to(device), torch.tensor(rope.axes, device=device)
        self.num_axes = max(rope.axes) + 1

    def fill(self, step: StepInputs) -> None:
        """The rows of a step's tokens."""
        assert step.axes is not None, "this model's positions have several axes"
        rows, pairs = self._cos_sin[: step.num_tokens], len(self._frequencies_P)
        angles_TP = step.axes[: step.num_tokens].index_select(1, self._axes_P).float() * self._frequencies_P
        torch.mul(angles_TP.cos(), self._amplitude, out=rows[:, :pairs])
        torch.mul(angles_TP.sin(), self._amplitude, out=rows[:, pairs:])
