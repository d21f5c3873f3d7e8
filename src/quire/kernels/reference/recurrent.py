"""Reference convolutions, scans and gates of recurrent layers: one request, one page and one token after another."""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quire.attention.interface import AttentionMetadata
from quire.kernels.recurrent import DeltaWeights, SsdWeights
from quire.kernels.registry import kernel

GATES = {"identity": lambda x: x, "silu": silu, "sigmoid": torch.sigmoid}


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens [start, end) of the step that belong to one request and one page. `start_page` is where its state before them is
    (None: zeros), `page` takes the state after the last one."""

    start: int
    end: int
    start_page: int | None
    page: int


def spans(metadata: AttentionMetadata) -> Iterator[Span]:
    """The step's tokens in pieces that end where a state is kept."""
    size = metadata.block_size
    for b in range(metadata.num_requests):
        start, end = int(metadata.query_start[b]), int(metadata.query_start[b + 1])
        pages = metadata.block_table[int(metadata.rows[b])]
        position = int(metadata.seq_lens[b]) - (end - start)
        while start < end:
            count = min(size - position % size, end - start)
            before = int(pages[(position - 1) // size]) if position > 0 else None
            yield Span(start, start + count, before, int(pages[position // size]))
            start, position = start + count, position + count


def _start(span: Span, states: Tensor) -> Tensor:
    return torch.zeros_like(states[0]) if span.start_page is None else states[span.start_page].clone()


@kernel("causal_conv", platform="any")
def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    gate: str,
    states_PVC: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    width = weight_WC.shape[0]
    for span in spans(metadata):
        state_VC = _start(span, states_PVC)
        inputs_LC = torch.cat((state_VC, x_TC[span.start : span.end].float()))
        y_TC = (inputs_LC.unfold(0, width, 1) * weight_WC.float().t()).sum(-1)
        if bias_C is not None:
            y_TC = y_TC + bias_C.float()
        out_TC[span.start : span.end].copy_(GATES[gate](y_TC))
        state_VC = inputs_LC[len(inputs_LC) - width + 1 :]
        states_PVC[span.page] = state_VC


@kernel("selective_scan", platform="any")
def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    a_SC: Tensor,
    d_C: Tensor,
    states_PSC: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    dt = softplus(dt_TC.float())
    for span in spans(metadata):
        h_SC = _start(span, states_PSC)
        for t in range(span.start, span.end):
            x_C = x_TC[t].float()
            h_SC = torch.exp(dt[t] * a_SC) * h_SC + b_TS[t].float()[:, None] * (dt[t] * x_C)
            out_TC[t] = (c_TS[t].float()[:, None] * h_SC).sum(0) + d_C * x_C
        states_PSC[span.page] = h_SC


@kernel("ssd_scan", platform="any")
def ssd_scan(
    x_TNH: Tensor,
    dt_TN: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    weights: SsdWeights,
    states_PNSH: Tensor,
    metadata: AttentionMetadata,
    out_TNH: Tensor,
) -> None:
    each = x_TNH.shape[1] // b_TGS.shape[1]
    dt = softplus(dt_TN.float() + weights.dt_bias_N).clamp(weights.dt_min, weights.dt_max)
    for span in spans(metadata):
        h_NSH = _start(span, states_PNSH)
        for t in range(span.start, span.end):
            x_NH, dt_N = x_TNH[t].float(), dt[t]
            b_NS, c_NS = (value[t].float().repeat_interleave(each, 0) for value in (b_TGS, c_TGS))
            decay_N = torch.exp(dt_N * weights.a_N)
            h_NSH = decay_N[:, None, None] * h_NSH + b_NS[:, :, None] * (dt_N[:, None] * x_NH)[:, None]
            out_TNH[t] = (c_NS[:, :, None] * h_NSH).sum(1) + weights.d_N[:, None] * x_NH
        states_PNSH[span.page] = h_NSH


@kernel("gated_delta_rule", platform="any")
def gated_delta_rule(
    q_TKS: Tensor,
    k_TKS: Tensor,
    v_TNH: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    weights: DeltaWeights,
    states_PNSH: Tensor,
    metadata: AttentionMetadata,
    out_TNH: Tensor,
) -> None:
    each = v_TNH.shape[1] // k_TKS.shape[1]
    q, k = (
        (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(each, 1)
        for x in (q_TKS.float(), k_TKS.float())
    )
    q = q / math.sqrt(q.shape[-1])
    decay_TN = torch.exp(weights.a_N * softplus(a_TN.float() + weights.dt_bias_N))
    beta_TN = torch.sigmoid(b_TN.float()) * weights.beta_scale
    for span in spans(metadata):
        h_NSH = _start(span, states_PNSH)
        for t in range(span.start, span.end):
            h_NSH = decay_TN[t][:, None, None] * h_NSH
            error_NH = v_TNH[t].float() - (k[t][:, :, None] * h_NSH).sum(1)
            h_NSH = h_NSH + k[t][:, :, None] * (beta_TN[t][:, None] * error_NH)[:, None]
            out_TNH[t] = (q[t][:, :, None] * h_NSH).sum(1)
        states_PNSH[span.page] = h_NSH


@kernel("gated_norm", platform="any")
def gated_norm(
    x_TC: Tensor, gate_TC: Tensor | None, weight_C: Tensor, eps: float, group: int, norm_first: bool, out_TC: Tensor
) -> None:
    x = x_TC.float()
    gate = torch.ones_like(x) if gate_TC is None else silu(gate_TC.float())
    if not norm_first:
        x = x * gate
    grouped = x.unflatten(-1, (-1, group))
    x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_C
    out_TC.copy_(x * gate if norm_first else x)


@kernel("gate", platform="any")
def gate(x_TC: Tensor, gate_TC: Tensor, kind: str, out_TC: Tensor) -> None:
    out_TC.copy_(x_TC.float() * GATES[kind](gate_TC.float()))


@kernel("scale_columns", platform="any")
def scale_columns(x_TC: Tensor, scale_C: Tensor | None, out_TC: Tensor) -> None:
    out_TC.copy_(x_TC if scale_C is None else x_TC.float() * scale_C)
