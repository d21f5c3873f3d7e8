"""Reference convolutions, scans and gates of recurrent layers: one request, one page and one token after another."""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quire.attention.interface import AttentionMetadata
from quire.kernels.recurrent import DeltaWeights, LruWeights, SsdWeights
from quire.kernels.registry import kernel

NOTHING = -1e38
"""The logarithm of a scale at which nothing is left."""
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
    decay = _delta_decays(a_TN.float(), weights)  # [T, N, 1] or [T, N, S]
    beta_TN = torch.sigmoid(b_TN.float()) * weights.beta_scale
    for span in spans(metadata):
        h_NSH = _start(span, states_PNSH)
        for t in range(span.start, span.end):
            h_NSH = decay[t][:, :, None] * h_NSH
            error_NH = v_TNH[t].float() - (k[t][:, :, None] * h_NSH).sum(1)
            h_NSH = h_NSH + k[t][:, :, None] * (beta_TN[t][:, None] * error_NH)[:, None]
            out_TNH[t] = (q[t][:, :, None] * h_NSH).sum(1)
        states_PNSH[span.page] = h_NSH


def _delta_decays(a: Tensor, weights: DeltaWeights) -> Tensor:
    """Factors on states, by head or by the numbers of a state's column."""
    a_N1, given = weights.a_N[:, None], a.unsqueeze(-1) if a.dim() == 2 else a
    given = given + weights.dt_bias_N.view(given.shape[1:])
    return torch.exp(weights.floor * torch.sigmoid(-a_N1 * given) if weights.floor else a_N1 * softplus(given))


@kernel("rg_lru", platform="any")
def rg_lru(
    x_TC: Tensor,
    input_TC: Tensor,
    forget_TC: Tensor,
    weights: LruWeights,
    states_P1C: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    log_TC = weights.a_C * torch.sigmoid(forget_TC.float() + weights.forget_bias_C)
    given_TC = x_TC.float() * torch.sigmoid(input_TC.float() + weights.input_bias_C)
    scale_TC = torch.sqrt(1 - torch.exp(2 * log_TC))
    for span in spans(metadata):
        h_1C = _start(span, states_P1C)
        for t in range(span.start, span.end):
            is_first = span.start_page is None and t == span.start
            h_1C = torch.exp(log_TC[t]) * h_1C + given_TC[t] * (1.0 if is_first else scale_TC[t])
            out_TC[t] = h_1C[0]
        states_P1C[span.page] = h_1C


@kernel("wkv", platform="any")
def wkv(
    k_TC: Tensor,
    v_TC: Tensor,
    decay_C: Tensor,
    first_C: Tensor,
    states_P3C: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    for span in spans(metadata):
        total_C, weight_C, scale_C = _start(span, states_P3C)
        if span.start_page is None:
            scale_C = torch.full_like(scale_C, NOTHING)
        for t in range(span.start, span.end):
            k_C, v_C = k_TC[t].float(), v_TC[t].float()
            largest_C = torch.maximum(scale_C, k_C + first_C)
            old_C, own_C = torch.exp(scale_C - largest_C), torch.exp(k_C + first_C - largest_C)
            out_TC[t] = (old_C * total_C + own_C * v_C) / (old_C * weight_C + own_C)
            largest_C = torch.maximum(scale_C + decay_C, k_C)
            old_C, own_C = torch.exp(scale_C + decay_C - largest_C), torch.exp(k_C - largest_C)
            total_C, weight_C, scale_C = old_C * total_C + own_C * v_C, old_C * weight_C + own_C, largest_C
        states_P3C[span.page] = torch.stack((total_C, weight_C, scale_C))


@kernel("gated_norm", platform="any")
def gated_norm(
    x_TC: Tensor,
    gate_TC: Tensor | None,
    weight_C: Tensor,
    eps: float,
    group: int,
    norm_first: bool,
    out_TC: Tensor,
    kind: str = "silu",
) -> None:
    x = x_TC.float()
    gate = torch.ones_like(x) if gate_TC is None else GATES[kind](gate_TC.float())
    if not norm_first:
        x = x * gate
    grouped = x.unflatten(-1, (-1, group))
    x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_C
    out_TC.copy_(x * gate if norm_first else x)


@kernel("gate", platform="any")
def gate(x_TC: Tensor, gate_TC: Tensor, kind: str, out_TC: Tensor) -> None:
    gate = GATES[kind](gate_TC.float()).repeat_interleave(x_TC.shape[1] // gate_TC.shape[1], dim=1)
    out_TC.copy_(x_TC.float() * gate)


@kernel("scale_columns", platform="any")
def scale_columns(x_TC: Tensor, scale_C: Tensor | None, out_TC: Tensor) -> None:
    out_TC.copy_(x_TC if scale_C is None else x_TC.float() * scale_C)
