"""Products and embeddings on the native library: tensors become pointers, and that is all.

Activations are float32 and contiguous; weights bfloat16, float16 or float32. Weights are repacked at load into the one layout
that every batch size reads (`csrc/micro.h`), and the original is dropped.
"""

import torch

from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.binding import address, cpu_kernel, dtype_number, float_address, pack_panels, run
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import LinearWeight


def _packed(weight: LinearWeight) -> torch.Tensor:
    if weight.packed is None:
        raise ValueError(f"this weight [{weight.out_features}, {weight.in_features}] was not packed by the CPU kernels")
    return weight.packed


@cpu_kernel("pack_linear")
def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    dtype_number(weight_NK.dtype, "a weight")
    bias = None if bias_N is None else bias_N.float().contiguous()
    n, k = weight_NK.shape
    return LinearWeight(n, k, weight_NK.dtype, None, pack_panels(weight_NK[None]), bias)


@cpu_kernel("linear")
def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    packed = _packed(weight)
    rows, width = x_TK.shape
    if width != weight.in_features or out_TN.shape[1] != weight.out_features or out_TN.shape[0] < rows:
        wanted = f"[{rows}, {weight.in_features}] and [{rows}, {weight.out_features}]"
        raise ValueError(f"x and out must be {wanted}; they are {list(x_TK.shape)} and {list(out_TN.shape)}")
    call = native.LinearArguments(
        float_address(x_TK, "x"),
        packed.data_ptr(),
        float_address(weight.bias, "bias"),
        float_address(out_TN, "out"),
        weight.out_features,
        weight.in_features,
        DTYPES[weight.dtype],
    )
    run("linear", call, x_TK.shape[0], x_TK, packed, weight.bias, out_TN)


def _embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float, accumulate: int) -> None:
    packed = _packed(weight)
    call = native.EmbeddingArguments(
        address(ids_T, torch.int32, "ids"),
        packed.data_ptr(),
        float_address(out_TD, "out"),
        weight.out_features,
        weight.in_features,
        scale,
        accumulate,
        DTYPES[weight.dtype],
    )
    run("embedding", call, ids_T.shape[0], ids_T, packed, out_TD)


@cpu_kernel("embedding")
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _embedding(ids_T, weight, out_TD, scale, 0)


@cpu_kernel("add_embedding")
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    _embedding(ids_T, weight, out_TD, 1.0, 1)
