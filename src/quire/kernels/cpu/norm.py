"""Norms, activations and other operations on single rows on the native library: tensors become pointers, and that is all."""

import torch

from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.arguments import structure
from quire.kernels.cpu.binding import address, cpu_kernel, float_address, rows_address, run
from quire.kernels.norm import ACTIVATIONS

NUMBERS = {kind: number for number, kind in enumerate(ACTIVATIONS)}
"""Activations by the number that the library gives them (`csrc/elementwise.h`): their place in `kernels/norm.py`."""


_SigmoidGate = structure("_SigmoidGate", pointers="x gate", longs="d gate_stride", ints="each")


@cpu_kernel("sigmoid_gate")
def sigmoid_gate(x_TI: torch.Tensor, gate_TG: torch.Tensor) -> None:
    gate, is_each = rows_address(gate_TG, "gate"), int(gate_TG.shape[1] > 1)
    call = _SigmoidGate(float_address(x_TI, "x"), gate, x_TI.shape[1], gate_TG.stride(0), is_each)
    run("sigmoid_gate", call, x_TI.shape[0], x_TI, gate_TG)


def _norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    subtract_mean: int,
) -> None:
    call = native.NormArguments(
        float_address(x_TD, "x"),
        float_address(weight_D, "weight"),
        float_address(bias_D, "bias"),
        float_address(out_TD, "out"),
        float_address(residual_TD, "residual"),
        x_TD.shape[-1],
        1,
        x_TD.shape[-1],
        eps,
        subtract_mean,
    )
    run("norm", call, x_TD.shape[0], x_TD, weight_D, bias_D, out_TD, residual_TD)


@cpu_kernel("rms_norm")
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, None, eps, out_TD, residual_TD, 0)


@cpu_kernel("layer_norm")
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, bias_D, eps, out_TD, residual_TD, 1)


@cpu_kernel("head_norm")
def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    x = rows_address(x_TGH, "x")
    weight, bias, (groups, size) = float_address(weight_GH, "weight"), float_address(bias_GH, "bias"), weight_GH.shape
    call = native.NormArguments(x, weight, bias, x, None, size, groups, x_TGH.stride(0), eps, int(subtract_mean))
    run("norm", call, x_TGH.shape[0], x_TGH, weight_GH, bias_GH)


@cpu_kernel("add")
def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    call = native.AddArguments(float_address(x_TD, "x"), float_address(out_TD, "out"), x_TD.shape[-1], scale)
    run("add", call, x_TD.shape[0], x_TD, out_TD)


def _activation_number(kind: str) -> int:
    if kind not in NUMBERS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(NUMBERS)}")
    return NUMBERS[kind]


@cpu_kernel("gated_activation")
def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    call = native.ActivationArguments(
        float_address(x_T2I, "x"), float_address(out_TI, "out"), out_TI.shape[-1], _activation_number(kind), 1
    )
    run("activation", call, x_T2I.shape[0], x_T2I, out_TI)


@cpu_kernel("activation")
def activation(x_TI: torch.Tensor, kind: str) -> None:
    x = float_address(x_TI, "x")
    call = native.ActivationArguments(x, x, x_TI.shape[-1], _activation_number(kind), 0)
    run("activation", call, x_TI.shape[0], x_TI)


@cpu_kernel("xielu")
def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    call = native.XieluArguments(float_address(x_TI, "x"), float_address(alphas_2, "alphas"), x_TI.shape[1])
    run("xielu", call, x_TI.shape[0], x_TI, alphas_2)


@cpu_kernel("clip")
def clip(x_TC: torch.Tensor, limit: float) -> None:
    call = native.ClipArguments(rows_address(x_TC, "x"), x_TC.shape[1], x_TC.stride(0), limit)
    run("clip", call, x_TC.shape[0], x_TC)


@cpu_kernel("scale_rows")
def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    table, index = float_address(table_L, "table"), address(index_T, torch.int32, "index")
    call = native.ScaleRowsArguments(rows_address(x_TC, "x"), table, index, x_TC.shape[1], x_TC.stride(0))
    run("scale_rows", call, x_TC.shape[0], x_TC, table_L, index_T)


@cpu_kernel("gather_rows")
def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    call = native.GatherArguments(
        float_address(x_TD, "x"), address(index_S, torch.int32, "index"), float_address(out_SD, "out"), x_TD.shape[-1]
    )
    run("gather_rows", call, index_S.shape[0], x_TD, index_S, out_SD)


@cpu_kernel("scale_and_cap")
def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    call = native.ScaleAndCapArguments(float_address(x_TV, "x"), x_TV.shape[-1], scale, soft_cap)
    run("scale_and_cap", call, x_TV.shape[0], x_TV)
