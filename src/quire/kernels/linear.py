"""Products with plain weights, and embeddings.

Legend: T rows (tokens), N outputs, K inputs, D hidden, I intermediate.
"""

import torch
from torch import Tensor

from quire.kernels.norm import gated, rms
from quire.kernels.registry import operation
from quire.kernels.types import LinearWeight


def _plain(weight: LinearWeight) -> Tensor:
    if weight.data is None:
        raise ValueError(
            "`pack_linear` dropped this weight's original, which references read: keep it as `data`, or choose kernels "
            "for all operations that take the weight"
        )
    return weight.data


@operation
def pack_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> LinearWeight:
    """Prepare a weight for `linear` (and, for tied embeddings, for `embedding`). May drop the original layout."""
    bias = None if bias_N is None else bias_N.float()
    return LinearWeight(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype, weight_NK.contiguous(), None, bias)


@operation
def linear(x_TK: Tensor, weight: LinearWeight, out_TN: Tensor) -> None:
    """out = x @ weight.T (+ bias); accumulates in float32."""
    out_TN.copy_(_product(x_TK, weight))


def _product(x_TK: Tensor, weight: LinearWeight) -> Tensor:
    out = torch.nn.functional.linear(x_TK.to(weight.dtype), _plain(weight)).float()
    return out if weight.bias is None else out + weight.bias


def _normed_product(x_TD: Tensor, norm_D: Tensor, eps: float, weight: LinearWeight) -> Tensor:
    return _product(rms(x_TD, norm_D, eps).to(x_TD.dtype), weight)


@operation
def norm_linear(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: LinearWeight,
    out_TN: Tensor,
    scratch_TD: Tensor,
) -> None:
    """out = rms_norm(x) @ weight.T (+ bias); x stays as it is. norm_D is the norm's float32 weight; the scratch, of x's
    type, may be overwritten."""
    out_TN.copy_(_normed_product(x_TD, norm_D, eps, weight))


@operation
def norm_linear_gated(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: LinearWeight,
    kind: str,
    out_TI: Tensor,
    scratch_TD: Tensor,
    scratch_T2I: Tensor,
) -> None:
    """y = rms_norm(x) @ weight.T (+ bias), then out = act(y[:, :I]) * y[:, I:]: the weight's rows are gate, then up; `kind`
    as in `gated_activation`. x stays as it is; both scratches may be overwritten."""
    out_TI.copy_(gated(_normed_product(x_TD, norm_D, eps, weight), kind))


@operation
def linear_add(x_TK: Tensor, weight: LinearWeight, residual_TN: Tensor) -> None:
    """residual += x @ weight.T (+ bias)."""
    residual_TN.copy_(residual_TN.float() + _product(x_TK, weight))


@operation
def embedding(ids_T: Tensor, weight: LinearWeight, out_TD: Tensor, scale: float = 1.0) -> None:
    """out[t] = weight[ids[t]] * scale; ids are int32."""
    out_TD.copy_(_plain(weight)[ids_T.long()].float() * scale)


@operation
def add_embedding(ids_T: Tensor, weight: LinearWeight, out_TD: Tensor) -> None:
    """out[t] += weight[ids[t]] (learned positions); ids are int32."""
    out_TD.add_(_plain(weight)[ids_T.long()].to(out_TD.dtype))
