"""Operations of hyper connections (https://arxiv.org/abs/2512.24880), which keep several residual streams.

Legend: T tokens, N streams, D hidden, M weights that a token's streams make: N to read, N to write and perhaps N * N to mix.
"""

from typing import TypeAlias

import torch

from quire.kernels import ops

StreamWeights: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""What an output is multiplied with for each stream [T, N], and the matrix that mixes streams [T, N from, N to], or None."""


def read_streams(
    streams_TND: torch.Tensor,
    matrix_MC: torch.Tensor,
    base_M: torch.Tensor,
    scale_K: torch.Tensor,
    norm_eps: float,
    eps: float,
    magnitude: float,
    write_eps: float,
    sinkhorn: int,
    out_TD: torch.Tensor,
) -> StreamWeights:
    """With w = scale * (matrix @ streams / rms(streams)) + base, a scale for each kind of weights: out = sum over streams of
    (sigmoid(w) + eps) * stream; outputs are multiplied with magnitude * sigmoid(w) + write_eps; and streams are mixed by
    softmax(w) + eps, whose columns and rows are divided by their sums in turn, `sinkhorn` times. All of it in float32.

    Args:
        matrix_MC: C = N * D. With N rows alone, nothing is to be written.
    """
    return ops.chosen("read_streams")(
        streams_TND, matrix_MC, base_M, scale_K, norm_eps, eps, magnitude, write_eps, sinkhorn, out_TD
    )


def write_streams(streams_TND: torch.Tensor, weights: StreamWeights, x_TD: torch.Tensor) -> None:
    """streams = their mixture (or they themselves) + weight of each stream * x, in place."""
    ops.chosen("write_streams")(streams_TND, weights, x_TD)
