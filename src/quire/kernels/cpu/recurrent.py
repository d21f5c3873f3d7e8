"""The operations of `kernels/recurrent.py` on the native library: tensors become pointers, and that is all.

Activations are float32 as everywhere on the CPU; a row's values lie side by side, rows may be columns of a wider matrix.
The argument structures are field by field those of `csrc/recurrent.h` and `csrc/recurrent_scan.h`.
"""

import ctypes
import math

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu.arguments import structure
from quire.kernels.cpu.binding import cpu_kernel, float_address, run
from quire.kernels.recurrent import GATES
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights

_Batch = structure(
    "_Batch", pointers="query_start seq_lens table_rows block_table shape", longs="block_size block_table_stride"
)
_BATCH = ("batch", _Batch)
_Conv = structure(
    "_Conv",
    _BATCH,
    pointers="x weight bias states out",
    longs="x_stride page_stride out_stride channels width",
    ints="gate",
)
_Gate = structure("_Gate", pointers="x gate out", longs="x_stride gate_stride out_stride channels each", ints="kind")
_ScaleColumns = structure("_ScaleColumns", pointers="x scale out", longs="x_stride out_stride channels")
_SelectiveScan = structure(
    "_SelectiveScan",
    _BATCH,
    pointers="x dt b c a d states out",
    longs="x_stride dt_stride b_stride c_stride page_stride out_stride channels state",
)
_Ssd = structure(
    "_Ssd",
    _BATCH,
    pointers="x dt b c a d dt_bias states out",
    longs="x_stride dt_stride b_stride c_stride page_stride out_stride heads groups head_dim state",
    floats="dt_min dt_max",
)
_Delta = structure(
    "_Delta",
    _BATCH,
    pointers="q k v a b a_weight dt_bias states out",
    longs="q_stride k_stride v_stride a_stride b_stride page_stride out_stride heads key_heads head_dim state",
    floats="beta_scale floor",
    ints="by_number",
)
_RgLru = structure(
    "_RgLru",
    _BATCH,
    pointers="x input forget a input_bias forget_bias states out",
    longs="x_stride input_stride forget_stride page_stride out_stride channels",
)
_Wkv = structure(
    "_Wkv", _BATCH, pointers="k v decay first states out", longs="k_stride v_stride page_stride out_stride channels"
)
_GatedNorm = structure(
    "_GatedNorm",
    pointers="x gate weight out",
    longs="x_stride gate_stride out_stride channels group",
    floats="eps",
    ints="norm_first kind",
)


def _rows(tensor: torch.Tensor, name: str) -> tuple[int, int]:
    """Where a tensor's rows begin, and how far they are apart."""
    inner = tensor.shape[1:]
    is_side_by_side = all(
        size == 1 or tensor.stride(axis + 1) == math.prod(inner[axis + 1 :]) for axis, size in enumerate(inner)
    )
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or not is_side_by_side:
        raise ValueError(
            f"{name} must be a CPU tensor of torch.float32 whose rows are contiguous; it is {tensor.dtype} on"
            f" {tensor.device}, {list(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.data_ptr(), tensor.stride(0)


def _gate_number(kind: str) -> int:
    if kind not in GATES:
        raise ValueError(f"gate {kind!r} is unknown; known are {', '.join(GATES)}")
    return GATES.index(kind)


def _batch(metadata: AttentionMetadata) -> tuple[ctypes.Structure, tuple[torch.Tensor, ...]]:
    tensors = (metadata.query_start, metadata.seq_lens, metadata.rows, metadata.block_table, metadata.shape)
    pointers = (tensor.data_ptr() for tensor in tensors)
    return _Batch(*pointers, metadata.block_size, metadata.block_table.stride(0)), tensors


@cpu_kernel("causal_conv")
def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    gate: str,
    states_PVC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    (batch, held), (x, x_stride) = _batch(metadata), _rows(x_TC, "x")
    (states, page_stride), (out, out_stride) = _rows(states_PVC, "states"), _rows(out_TC, "out")
    width, channels = weight_WC.shape
    call = _Conv(
        batch,
        x,
        float_address(weight_WC, "weight"),
        float_address(bias_C, "bias"),
        states,
        out,
        x_stride,
        page_stride,
        out_stride,
        channels,
        width,
        _gate_number(gate),
    )
    run("causal_conv", call, x_TC.shape[0], x_TC, weight_WC, bias_C, states_PVC, out_TC, *held)


@cpu_kernel("selective_scan")
def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TS: torch.Tensor,
    c_TS: torch.Tensor,
    a_SC: torch.Tensor,
    d_C: torch.Tensor,
    states_PSC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    batch, held = _batch(metadata)
    tensors = {"x": x_TC, "dt": dt_TC, "b": b_TS, "c": c_TS, "states": states_PSC, "out": out_TC}
    (x, dt, b, c, states, out), strides = zip(*(_rows(tensor, name) for name, tensor in tensors.items()), strict=True)
    state, channels = a_SC.shape
    call = _SelectiveScan(
        batch, x, dt, b, c, float_address(a_SC, "a"), float_address(d_C, "d"), states, out, *strides, channels, state
    )
    run("selective_scan", call, x_TC.shape[0], *tensors.values(), a_SC, d_C, *held)


@cpu_kernel("ssd_scan")
def ssd_scan(
    x_TNH: torch.Tensor,
    dt_TN: torch.Tensor,
    b_TGS: torch.Tensor,
    c_TGS: torch.Tensor,
    weights: SsdWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
) -> None:
    batch, held = _batch(metadata)
    tensors = {"x": x_TNH, "dt": dt_TN, "b": b_TGS, "c": c_TGS, "states": states_PNSH, "out": out_TNH}
    (x, dt, b, c, states, out), strides = zip(*(_rows(tensor, name) for name, tensor in tensors.items()), strict=True)
    constants = (weights.a_N, weights.d_N, weights.dt_bias_N)
    _, heads, state, head_dim = states_PNSH.shape
    call = _Ssd(
        batch,
        x,
        dt,
        b,
        c,
        *map(float_address, constants, ("a", "d", "dt_bias")),
        states,
        out,
        *strides,
        heads,
        b_TGS.shape[1],
        head_dim,
        state,
        weights.dt_min,
        weights.dt_max,
    )
    run("ssd_scan", call, x_TNH.shape[0], *tensors.values(), *constants, *held)


@cpu_kernel("gated_delta_rule")
def gated_delta_rule(
    q_TKS: torch.Tensor,
    k_TKS: torch.Tensor,
    v_TNH: torch.Tensor,
    a_TN: torch.Tensor,
    b_TN: torch.Tensor,
    weights: DeltaWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
) -> None:
    batch, held = _batch(metadata)
    tensors = {"q": q_TKS, "k": k_TKS, "v": v_TNH, "a": a_TN, "b": b_TN, "states": states_PNSH, "out": out_TNH}
    (q, k, v, a, b, states, out), strides = zip(*(_rows(tensor, name) for name, tensor in tensors.items()), strict=True)
    constants = (weights.a_N, weights.dt_bias_N)
    _, heads, state, head_dim = states_PNSH.shape
    call = _Delta(
        batch,
        q,
        k,
        v,
        a,
        b,
        *map(float_address, constants, ("a", "dt_bias")),
        states,
        out,
        *strides,
        heads,
        k_TKS.shape[1],
        head_dim,
        state,
        weights.beta_scale,
        weights.floor,
        int(a_TN.dim() == 3),
    )
    run("gated_delta_rule", call, q_TKS.shape[0], *tensors.values(), *constants, *held)


@cpu_kernel("rg_lru")
def rg_lru(
    x_TC: torch.Tensor,
    input_TC: torch.Tensor,
    forget_TC: torch.Tensor,
    weights: LruWeights,
    states_P1C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    batch, held = _batch(metadata)
    tensors = {"x": x_TC, "input": input_TC, "forget": forget_TC, "states": states_P1C, "out": out_TC}
    (x, given, forget, states, out), strides = zip(*(_rows(each, name) for name, each in tensors.items()), strict=True)
    constants = (weights.a_C, weights.input_bias_C, weights.forget_bias_C)
    call = _RgLru(
        batch,
        x,
        given,
        forget,
        *map(float_address, constants, ("a", "input_bias", "forget_bias")),
        states,
        out,
        *strides,
        x_TC.shape[1],
    )
    run("rg_lru", call, x_TC.shape[0], *tensors.values(), *constants, *held)


@cpu_kernel("wkv")
def wkv(
    k_TC: torch.Tensor,
    v_TC: torch.Tensor,
    decay_C: torch.Tensor,
    first_C: torch.Tensor,
    states_P3C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    batch, held = _batch(metadata)
    tensors = {"k": k_TC, "v": v_TC, "states": states_P3C, "out": out_TC}
    (k, v, states, out), strides = zip(*(_rows(tensor, name) for name, tensor in tensors.items()), strict=True)
    call = _Wkv(
        batch,
        k,
        v,
        float_address(decay_C, "decay"),
        float_address(first_C, "first"),
        states,
        out,
        *strides,
        k_TC.shape[1],
    )
    run("wkv", call, k_TC.shape[0], *tensors.values(), decay_C, first_C, *held)


@cpu_kernel("gated_norm")
def gated_norm(
    x_TC: torch.Tensor,
    gate_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    eps: float,
    group: int,
    norm_first: bool,
    out_TC: torch.Tensor,
    kind: str = "silu",
) -> None:
    (x, x_stride), (out, out_stride) = _rows(x_TC, "x"), _rows(out_TC, "out")
    gate, gate_stride = (None, 0) if gate_TC is None else _rows(gate_TC, "gate")
    call = _GatedNorm(
        x,
        gate,
        float_address(weight_C, "weight"),
        out,
        x_stride,
        gate_stride,
        out_stride,
        x_TC.shape[1],
        group,
        eps,
        int(norm_first),
        _gate_number(kind),
    )
    run("gated_norm", call, x_TC.shape[0], x_TC, gate_TC, weight_C, out_TC)


@cpu_kernel("gate")
def gate(x_TC: torch.Tensor, gate_TC: torch.Tensor, kind: str, out_TC: torch.Tensor) -> None:
    (x, x_stride), (by, by_stride), (out, out_stride) = (_rows(x_TC, "x"), _rows(gate_TC, "gate"), _rows(out_TC, "out"))
    channels = x_TC.shape[1]
    call = _Gate(
        x, by, out, x_stride, by_stride, out_stride, channels, channels // gate_TC.shape[1], _gate_number(kind)
    )
    run("gate", call, x_TC.shape[0], x_TC, gate_TC, out_TC)


@cpu_kernel("scale_columns")
def scale_columns(x_TC: torch.Tensor, scale_C: torch.Tensor | None, out_TC: torch.Tensor) -> None:
    (x, x_stride), (out, out_stride) = _rows(x_TC, "x"), _rows(out_TC, "out")
    call = _ScaleColumns(x, float_address(scale_C, "scale"), out, x_stride, out_stride, x_TC.shape[1])
    run("scale_columns", call, x_TC.shape[0], x_TC, scale_C, out_TC)
