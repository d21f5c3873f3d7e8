"""Hyper connections in plain PyTorch, in float32; fixed shapes and no look at values, so that a GPU's graph can hold them."""

import torch

from quire.kernels.hyper import StreamWeights
from quire.kernels.registry import kernel


@kernel("read_streams", platform="any")
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


@kernel("write_streams", platform="any")
def write_streams(streams_TND: torch.Tensor, weights: StreamWeights, x_TD: torch.Tensor) -> None:
    write_TN, mix_TNN = weights
    kept_TND = streams_TND.float() if mix_TNN is None else mix_TNN.transpose(1, 2) @ streams_TND.float()
    streams_TND.copy_(kept_TND + write_TN[..., None] * x_TD.float()[:, None])
