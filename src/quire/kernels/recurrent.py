"""Operations of layers that keep a state instead of keys and values: short convolutions, state-space scans, the delta rule,
gated linear recurrences.

A layer's state after a token is a fixed number of float32 values. Pages hold states: page i of a request's table holds the
state after its first (i + 1) * block_size tokens, or after all that were computed where those are fewer. Each operation below
that takes `states` goes over the step's tokens request by request. It starts with the state of the page of the token
before (zeros before the first token), and leaves the state in every page whose last token it computes and in the page of
the request's last token. Sums and states are float32. Inputs and outputs are rows whose values lie side by side; the step
from row to row is free, so that they may be columns of a wider matrix. No output may be an input.

Legend: T tokens, P pages, C channels, W inputs that a convolution sees, N heads, K heads of queries and keys, H size of a
head, G groups of heads that share B and C, S size of the state of one channel.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import operation
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights

NOTHING = -1e38
"""The logarithm of a scale at which nothing is left."""
_GATES = {"identity": lambda x: x, "silu": silu, "sigmoid": torch.sigmoid}
GATES = tuple(_GATES)
"""Names of gates; kernels know one by its place here."""


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


@operation
def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    gate: str,
    states_PVC: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    """Each channel by itself: y[t] = sum over w of weight[w] * x[t - W + 1 + w] (+ bias), over a request's own tokens
    (zeros before the first), then out = y (`identity`) or silu(y). The state is the last V = W - 1 inputs."""
    width = weight_WC.shape[0]
    for span in spans(metadata):
        state_VC = _start(span, states_PVC)
        inputs_LC = torch.cat((state_VC, x_TC[span.start : span.end].float()))
        y_TC = (inputs_LC.unfold(0, width, 1) * weight_WC.float().t()).sum(-1)
        if bias_C is not None:
            y_TC = y_TC + bias_C.float()
        out_TC[span.start : span.end].copy_(_GATES[gate](y_TC))
        state_VC = inputs_LC[len(inputs_LC) - width + 1 :]
        states_PVC[span.page] = state_VC


@operation
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
    """Mamba's scan (Gu and Dao, 2023), each channel by itself: with dt = softplus(dt), h[s] = exp(dt * a[s]) * h[s] +
    dt * b[s] * x and out = sum over s of c[s] * h[s] + d * x. a (negative) and d are float32."""
    dt = softplus(dt_TC.float())
    for span in spans(metadata):
        h_SC = _start(span, states_PSC)
        for t in range(span.start, span.end):
            x_C = x_TC[t].float()
            h_SC = torch.exp(dt[t] * a_SC) * h_SC + b_TS[t].float()[:, None] * (dt[t] * x_C)
            out_TC[t] = (c_TS[t].float()[:, None] * h_SC).sum(0) + d_C * x_C
        states_PSC[span.page] = h_SC


@operation
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
    """Mamba-2's scan (Dao and Gu, 2024), each head by itself: with dt = softplus(dt + dt_bias) within its bounds,
    h = exp(dt * a) * h + dt * b (outer) x and out = c . h + d * x. Consecutive heads share a group's b and c."""
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


@operation
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
    """The gated delta rule (Yang et al., 2024), each head by itself: queries and keys become unit vectors (1e-6 is added to
    the squared length), queries are divided by sqrt(S); h *= exp(weights.a * softplus(a + dt_bias)), or as `weights.floor`
    says; then h += k (outer) (v - k . h) * sigmoid(b) * beta_scale, and out = q . h. Consecutive heads share a query and key
    head. `a` may be [T, N, S]: then each number of a state's column decays by itself (Kimi Delta Attention, 2025)."""
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


@operation
def rg_lru(
    x_TC: Tensor,
    input_TC: Tensor,
    forget_TC: Tensor,
    weights: LruWeights,
    states_P1C: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    """The real-gated linear recurrent unit (De et al., 2024), each channel by itself: with log d = a * sigmoid(forget + bias),
    h = d * h + sqrt(1 - d^2) * sigmoid(input + bias) * x, and out = h. A request's first token has 1 in the square root's
    place."""
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


@operation
def wkv(
    k_TC: Tensor,
    v_TC: Tensor,
    decay_C: Tensor,
    first_C: Tensor,
    states_P3C: Tensor,
    metadata: AttentionMetadata,
    out_TC: Tensor,
) -> None:
    """RWKV-4's attention (Peng et al., 2023), each channel by itself: the mean of all values so far, weighted by exp(k), the
    token's own by exp(k + first); with each token earlier weights lose exp(decay), which is negative. float32 constants. A
    state is the weighted sum, the sum of weights, and the logarithm of what both are divided by."""
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


@operation
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
    """RMS norm over each `group` consecutive channels, with a gate: norm(x) * weight * f(gate) with `norm_first`, else
    norm(x * f(gate)) * weight; without a gate norm(x) * weight. f is one of `GATES`. weight is float32. `out` may be `x`."""
    x = x_TC.float()
    gate = torch.ones_like(x) if gate_TC is None else _GATES[kind](gate_TC.float())
    if not norm_first:
        x = x * gate
    grouped = x.unflatten(-1, (-1, group))
    x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_C
    out_TC.copy_(x * gate if norm_first else x)


@operation
def gate(x_TC: Tensor, gate_TC: Tensor, kind: str, out_TC: Tensor) -> None:
    """out = x * f(gate), with f one of `GATES`. A gate with fewer columns than x has one for so many consecutive columns
    (a head's). `out` may be `x` or, where it is as wide, `gate`."""
    gate = _GATES[kind](gate_TC.float()).repeat_interleave(x_TC.shape[1] // gate_TC.shape[1], dim=1)
    out_TC.copy_(x_TC.float() * gate)


@operation
def scale_columns(x_TC: Tensor, scale_C: Tensor | None, out_TC: Tensor) -> None:
    """out = x * scale, with a float32 factor a column, or just x. `out` may be `x`."""
    out_TC.copy_(x_TC if scale_C is None else x_TC.float() * scale_C)
