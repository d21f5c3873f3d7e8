"""Norms, activations and other operations on single rows on the native library: tensors become pointers, and that is all."""

import torch

from quire.kernels.cpu.binding import Operation, cpu_kernel
from quire.kernels.norm import ACTIVATIONS

NUMBERS = {kind: number for number, kind in enumerate(ACTIVATIONS)}
"""Activations by the number that the library gives them (`csrc/elementwise.h`): their place in `kernels/norm.py`."""


_SIGMOID_GATE = Operation("sigmoid_gate", "x gate:rows", longs="d gate_stride", ints="each")
_NORM = Operation(
    "norm", "x:rows weight bias out residual", longs="d groups x_stride", floats="eps", ints="subtract_mean"
)
_HEAD_NORM = Operation(
    "norm", "x:rows weight bias out:any residual", longs="d groups x_stride", floats="eps", ints="subtract_mean"
)
_ADD = Operation("add", "x out", longs="d", floats="scale")
_ACTIVATION = Operation("activation", "x out", longs="d", ints="kind gated")
_XIELU = Operation("xielu", "x alphas", longs="d")
_CLIP = Operation("clip", "x:rows", longs="d x_stride", floats="limit")
_SCALE_ROWS = Operation("scale_rows", "x:rows table index:int", longs="d x_stride")
_GATHER_ROWS = Operation("gather_rows", "x index:int out", longs="d")
_SCALE_AND_CAP = Operation("scale_and_cap", "x", longs="d", floats="scale soft_cap")


@cpu_kernel("sigmoid_gate")
def sigmoid_gate(x_TI: torch.Tensor, gate_TG: torch.Tensor) -> None:
    _SIGMOID_GATE(len(x_TI), x=x_TI, gate=gate_TG, d=x_TI.shape[1], each=gate_TG.shape[1] > 1)


@cpu_kernel("rms_norm")
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _NORM(len(x_TD), x=x_TD, weight=weight_D, out=out_TD, residual=residual_TD, d=x_TD.shape[-1], groups=1, eps=eps)


@cpu_kernel("layer_norm")
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    tensors = {"x": x_TD, "weight": weight_D, "bias": bias_D, "out": out_TD, "residual": residual_TD}
    _NORM(len(x_TD), **tensors, d=x_TD.shape[-1], groups=1, eps=eps, subtract_mean=1)


@cpu_kernel("head_norm")
def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    groups, size = weight_GH.shape
    tensors = {"x": x_TGH, "weight": weight_GH, "bias": bias_GH, "out": x_TGH}
    _HEAD_NORM(len(x_TGH), **tensors, d=size, groups=groups, eps=eps, subtract_mean=subtract_mean)


@cpu_kernel("add")
def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _ADD(len(x_TD), x=x_TD, out=out_TD, d=x_TD.shape[-1], scale=scale)


def _activation_number(kind: str) -> int:
    if kind not in NUMBERS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(NUMBERS)}")
    return NUMBERS[kind]


@cpu_kernel("gated_activation")
def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    _ACTIVATION(len(x_T2I), x=x_T2I, out=out_TI, d=out_TI.shape[-1], kind=_activation_number(kind), gated=1)


@cpu_kernel("activation")
def activation(x_TI: torch.Tensor, kind: str) -> None:
    _ACTIVATION(len(x_TI), x=x_TI, out=x_TI, d=x_TI.shape[-1], kind=_activation_number(kind))


@cpu_kernel("xielu")
def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    _XIELU(len(x_TI), x=x_TI, alphas=alphas_2, d=x_TI.shape[1])


@cpu_kernel("clip")
def clip(x_TC: torch.Tensor, limit: float) -> None:
    _CLIP(len(x_TC), x=x_TC, d=x_TC.shape[1], limit=limit)


@cpu_kernel("scale_rows")
def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    _SCALE_ROWS(len(x_TC), x=x_TC, table=table_L, index=index_T, d=x_TC.shape[1])


@cpu_kernel("gather_rows")
def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    _GATHER_ROWS(len(index_S), x=x_TD, index=index_S, out=out_SD, d=x_TD.shape[-1])


@cpu_kernel("scale_and_cap")
def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    _SCALE_AND_CAP(len(x_TV), x=x_TV, d=x_TV.shape[-1], scale=scale, soft_cap=soft_cap)
