"""What some models do to queries, keys and values, and backends of attention do not know: norms other than RMS of each head
with one weight, limits, factors by position.

Legend: T tokens, G norms side by side in a row, H values of one norm, C columns, L positions.
"""

import torch

from quire.kernels import ops


def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    """Norm each H values of the rows of x [T, G * H] in place; rows may lie apart. RMS norm, or layer norm where the mean is
    subtracted. Weight and bias are float32."""
    ops.chosen("head_norm")(x_TGH, weight_GH, bias_GH, eps, subtract_mean)


def clip(x_TC: torch.Tensor, limit: float) -> None:
    """Keep the values of rows, which may lie apart, within plus and minus the limit; in place."""
    ops.chosen("clip")(x_TC, limit)


def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    """x[t] *= table[index[t]], in place; rows may lie apart. The table is float32, the index int32."""
    ops.chosen("scale_rows")(x_TC, table_L, index_T)
