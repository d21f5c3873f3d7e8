"""Operations of hyper connections (https://arxiv.org/abs/2512.24880), which keep several residual streams.

Legend: T tokens, N streams, D hidden, M weights that a token's streams make: N to read, N to write and perhaps N * N to mix.
"""

import torch
from torch import Tensor

from quire.kernels.registry import operation
from quire.kernels.types import StreamWeights


@operation
def read_streams(
    streams_TND: Tensor,
    matrix_MC: Tensor,
    base_M: Tensor,
    scale_K: Tensor,
    norm_eps: float,
    eps: float,
    magnitude: float,
    write_eps: float,
    sinkhorn: int,
    out_TD: Tensor,
) -> StreamWeights:
    """With w = scale * (matrix @ streams / rms(streams)) + base, a scale for each kind of weights: out = sum over streams of
    (sigmoid(w) + eps) * stream; outputs are multiplied with magnitude * sigmoid(w) + write_eps; and streams are mixed by
    softmax(w) + eps, whose columns and rows are divided by their sums in turn, `sinkhorn` times. All of it in float32.

    Args:
        matrix_MC: C = N * D. With N rows alone, nothing is to be written.
    """
    streams = streams_TND.shape[1]
    x_TC = streams_TND.flatten(1).float()
    w_TM = torch.nn.functional.linear(x_TC, matrix_MC) * torch.rsqrt(x_TC.square().mean(-1, keepdim=True) + norm_eps)
    read_TN = torch.sigmoid(w_TM[:, :streams] * scale_K[0] + base_M[:streams]) + eps
    out_TD.copy_((read_TN[..., None] * streams_TND.float()).sum(1))
    if len(base_M) == streams:
        return read_TN, None
    second = slice(streams, 2 * streams)
    write_TN = magnitude * torch.sigmoid(w_TM[:, second] * scale_K[1] + base_M[second]) + write_eps
    if not sinkhorn:
        return write_TN, None
    mix_TNN = (w_TM[:, 2 * streams :] * scale_K[2] + base_M[2 * streams :]).unflatten(1, (streams, streams))
    mix_TNN = mix_TNN.softmax(-1) + eps
    mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn - 1):
        mix_TNN = mix_TNN / (mix_TNN.sum(-1, keepdim=True) + eps)
        mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + eps)
    return write_TN, mix_TNN


@operation
def write_streams(streams_TND: Tensor, weights: StreamWeights, x_TD: Tensor) -> None:
    """streams = their mixture (or they themselves) + weight of each stream * x, in place."""
    write_TN, mix_TNN = weights
    kept_TND = streams_TND.float() if mix_TNN is None else mix_TNN.transpose(1, 2) @ streams_TND.float()
    streams_TND.copy_(kept_TND + write_TN[..., None] * x_TD.float()[:, None])
