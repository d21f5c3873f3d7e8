"""Norms of the heads within rows of queries or keys, for what `ops.rope_and_cache` does not know: a mean that is taken out,
weights that differ by head, several heads normed as one.

Legend: T tokens, G norms side by side in a row, H values of one norm.
"""

import torch

from quire.kernels import ops


def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    """Norm each H values of the rows of x [T, G * H] in place; rows may lie apart. RMS norm, or layer norm where the mean is
    subtracted. Weight and bias are float32."""
    ops.chosen("head_norm")(x_TGH, weight_GH, bias_GH, eps, subtract_mean)
