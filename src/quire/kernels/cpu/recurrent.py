"""The operations of `kernels/recurrent.py` on the native library: tensors become pointers, and that is all.

Activations are float32 as everywhere on the CPU; a row's values lie side by side, rows may be columns of a wider matrix.
The argument structures are field by field those of `csrc/recurrent.h` and `csrc/recurrent_scan.h`.
"""

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.cpu.binding import Operation, cpu_kernel
from quire.kernels.recurrent import GATES
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights

_CONV = Operation(
    "causal_conv",
    "x:rows weight bias states:rows out:rows",
    has_batch=True,
    longs="x_stride states_stride out_stride channels width",
    ints="gate",
)
_GATE = Operation(
    "gate", "x:rows gate:rows out:rows", longs="x_stride gate_stride out_stride channels each", ints="kind"
)
_SCALE_COLUMNS = Operation("scale_columns", "x:rows scale out:rows", longs="x_stride out_stride channels")
_SELECTIVE_SCAN = Operation(
    "selective_scan",
    "x:rows dt:rows b:rows c:rows a d states:rows out:rows",
    has_batch=True,
    longs="x_stride dt_stride b_stride c_stride states_stride out_stride channels state",
)
_SSD = Operation(
    "ssd_scan",
    "x:rows dt:rows b:rows c:rows a d dt_bias states:rows out:rows",
    has_batch=True,
    longs="x_stride dt_stride b_stride c_stride states_stride out_stride heads groups head_dim state",
    floats="dt_min dt_max",
)
_DELTA = Operation(
    "gated_delta_rule",
    "q:rows k:rows v:rows a:rows b:rows a_weight dt_bias states:rows out:rows",
    has_batch=True,
    longs="q_stride k_stride v_stride a_stride b_stride states_stride out_stride heads key_heads head_dim state",
    floats="beta_scale floor",
    ints="by_number",
)
_RG_LRU = Operation(
    "rg_lru",
    "x:rows input:rows forget:rows a input_bias forget_bias states:rows out:rows",
    has_batch=True,
    longs="x_stride input_stride forget_stride states_stride out_stride channels",
)
_WKV = Operation(
    "wkv",
    "k:rows v:rows decay first states:rows out:rows",
    has_batch=True,
    longs="k_stride v_stride states_stride out_stride channels",
)
_GATED_NORM = Operation(
    "gated_norm",
    "x:rows gate:rows weight out:rows",
    longs="x_stride gate_stride out_stride channels group",
    floats="eps",
    ints="norm_first kind",
)


def _gate_number(kind: str) -> int:
    if kind not in GATES:
        raise ValueError(f"gate {kind!r} is unknown; known are {', '.join(GATES)}")
    return GATES.index(kind)


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
    width, channels = weight_WC.shape
    tensors = {"x": x_TC, "weight": weight_WC, "bias": bias_C, "states": states_PVC, "out": out_TC}
    _CONV(len(x_TC), metadata, **tensors, channels=channels, width=width, gate=_gate_number(gate))


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
    tensors = {"x": x_TC, "dt": dt_TC, "b": b_TS, "c": c_TS, "a": a_SC, "d": d_C, "states": states_PSC, "out": out_TC}
    state, channels = a_SC.shape
    _SELECTIVE_SCAN(len(x_TC), metadata, **tensors, channels=channels, state=state)


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
    _, heads, state, head_dim = states_PNSH.shape
    _SSD(
        len(x_TNH),
        metadata,
        x=x_TNH,
        dt=dt_TN,
        b=b_TGS,
        c=c_TGS,
        a=weights.a_N,
        d=weights.d_N,
        dt_bias=weights.dt_bias_N,
        states=states_PNSH,
        out=out_TNH,
        heads=heads,
        groups=b_TGS.shape[1],
        head_dim=head_dim,
        state=state,
        dt_min=weights.dt_min,
        dt_max=weights.dt_max,
    )


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
    _, heads, state, head_dim = states_PNSH.shape
    _DELTA(
        len(q_TKS),
        metadata,
        q=q_TKS,
        k=k_TKS,
        v=v_TNH,
        a=a_TN,
        b=b_TN,
        a_weight=weights.a_N,
        dt_bias=weights.dt_bias_N,
        states=states_PNSH,
        out=out_TNH,
        heads=heads,
        key_heads=k_TKS.shape[1],
        head_dim=head_dim,
        state=state,
        beta_scale=weights.beta_scale,
        floor=weights.floor,
        by_number=a_TN.dim() == 3,
    )


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
    biases = {"input_bias": weights.input_bias_C, "forget_bias": weights.forget_bias_C}
    tensors = {"x": x_TC, "input": input_TC, "forget": forget_TC, "states": states_P1C, "out": out_TC}
    _RG_LRU(len(x_TC), metadata, **tensors, a=weights.a_C, **biases, channels=x_TC.shape[1])


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
    tensors = {"k": k_TC, "v": v_TC, "decay": decay_C, "first": first_C, "states": states_P3C, "out": out_TC}
    _WKV(len(k_TC), metadata, **tensors, channels=k_TC.shape[1])


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
    tensors = {"x": x_TC, "gate": gate_TC, "weight": weight_C, "out": out_TC}
    sizes = {"channels": x_TC.shape[1], "group": group}
    _GATED_NORM(len(x_TC), **tensors, **sizes, eps=eps, norm_first=norm_first, kind=_gate_number(kind))


@cpu_kernel("gate")
def gate(x_TC: torch.Tensor, gate_TC: torch.Tensor, kind: str, out_TC: torch.Tensor) -> None:
    channels, gates = x_TC.shape[1], gate_TC.shape[1]
    each = channels // gates
    _GATE(len(x_TC), x=x_TC, gate=gate_TC, out=out_TC, channels=channels, each=each, kind=_gate_number(kind))


@cpu_kernel("scale_columns")
def scale_columns(x_TC: torch.Tensor, scale_C: torch.Tensor | None, out_TC: torch.Tensor) -> None:
    _SCALE_COLUMNS(len(x_TC), x=x_TC, scale=scale_C, out=out_TC, channels=x_TC.shape[1])
