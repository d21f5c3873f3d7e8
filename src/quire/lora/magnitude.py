"""DoRA: the sum of a matrix and its update gets rows of given lengths. Method: https://arxiv.org/abs/2402.09353

What a row is multiplied by follows from the base's matrix, of which only products are known, whatever its number format.
Legend: T rows of x, K inputs, N outputs, R rank.
"""

from collections.abc import Callable

import torch

from quire.kernels.adapters import AdapterPart
from quire.kernels.types import LinearWeight

Product = Callable[[torch.Tensor, LinearWeight], torch.Tensor]
"""x @ weight.T, without the bias, in float32."""
NONE = -1.0
"""The magnitude of an output that has none."""
COLUMNS = 64
"""Of a matrix that are looked at together."""


def squared_rows(weight: LinearWeight, product: Product, device: torch.device) -> torch.Tensor:
    """[N]: the sum of squares of each row of a matrix."""
    inputs, squares_N = weight.in_features, torch.zeros(weight.out_features, device=device)
    for first in range(0, inputs, COLUMNS):
        count = min(COLUMNS, inputs - first)
        units_TK = torch.zeros(count, inputs, device=device)
        units_TK[:, first : first + count].fill_diagonal_(1.0)
        squares_N += product(units_TK, weight).square().sum(0)
    return squares_N


def update_squares(part: AdapterPart, segment_N: torch.Tensor, weight: LinearWeight, product: Product) -> torch.Tensor:
    """[N]: what a part adds to the sum of squares of each row, when it is added to a matrix.

    Args:
        segment_N: of each output.
    """
    up_RN, squares_N = part.up.float(), torch.zeros(part.up.shape[1], device=part.up.device)
    for segment, down_RK in enumerate(part.down.split(part.rank)):
        crossed_RN, among_RR = product(down_RK, weight), down_RK.float() @ down_RK.float().T
        added_N = (up_RN * (2 * crossed_RN + among_RR @ up_RN)).sum(0)
        squares_N += torch.where(segment_N.to(added_N.device) == segment, added_N, 0.0)
    return squares_N


def apply_magnitude(part: AdapterPart, squares_N: torch.Tensor, bias_N: torch.Tensor | None) -> None:
    """Fill the gain and the shift of a part that has magnitudes, and stretch its update, all in place.

    Args:
        squares_N: sums of squares of the rows of matrix and update together.
    """
    assert part.magnitude is not None and part.gain is not None and part.shift is not None
    gain_N = torch.where(part.magnitude == NONE, 1.0, part.magnitude / squares_N.sqrt())
    part.up.copy_(part.up.float() * gain_N)
    part.gain.copy_(gain_N)
    if bias_N is not None:
        part.shift.add_(bias_N * (1 - gain_N))
    part.magnitude = None
