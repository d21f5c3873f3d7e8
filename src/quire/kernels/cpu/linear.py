"""Products and embeddings on the native library: tensors become pointers, and that is all.

Activations are float32 and contiguous; weights bfloat16, float16 or float32. Weights are repacked at load into the one layout
that every batch size reads (`csrc/micro.h`), and the original is dropped.
"""

import torch

from quire.kernels.cpu.binding import Operation, cpu_kernel, dtype_number, pack_panels
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import LinearWeight

_LINEAR = Operation("linear", "x packed:any bias out", longs="n k", ints="dtype")
_EMBEDDING = Operation("embedding", "ids:int packed:any out", longs="n k", floats="scale", ints="accumulate dtype")


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
    _LINEAR(rows, x=x_TK, packed=packed, bias=weight.bias, out=out_TN, **_sizes(weight))


def _sizes(weight: LinearWeight) -> dict[str, int]:
    return {"n": weight.out_features, "k": weight.in_features, "dtype": DTYPES[weight.dtype]}


@cpu_kernel("embedding")
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _EMBEDDING(len(ids_T), ids=ids_T, packed=_packed(weight), out=out_TD, scale=scale, **_sizes(weight))


@cpu_kernel("add_embedding")
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    tensors = {"ids": ids_T, "packed": _packed(weight), "out": out_TD}
    _EMBEDDING(len(ids_T), **tensors, scale=1.0, accumulate=1, **_sizes(weight))
