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

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels import ops

GATES = ("identity", "silu", "sigmoid")


@dataclasses.dataclass(frozen=True)
class SsdWeights:
    """A head's constants: float32 [N] each. `a` is negative; `dt_min` and `dt_max` bound the time step."""

    a_N: torch.Tensor
    d_N: torch.Tensor
    dt_bias_N: torch.Tensor
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclasses.dataclass(frozen=True)
class DeltaWeights:
    """A head's constants, float32: `a` [N], which is negative, and `dt_bias` [N], or [N, S] where the numbers of a state have
    decays of their own. `beta_scale` multiplies the strength of a write. `floor` (negative) bounds the logarithm of a decay:
    it is floor * sigmoid(-a * (input + dt_bias)); 0: it has no bound and is a * softplus(input + dt_bias)."""

    a_N: torch.Tensor
    dt_bias_N: torch.Tensor
    beta_scale: float = 1.0
    floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class LruWeights:
    """A channel's constants, float32 [C] each: `a` is negative, the biases belong to the gates."""

    a_C: torch.Tensor
    input_bias_C: torch.Tensor
    forget_bias_C: torch.Tensor


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    gate: str,
    states_PVC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """Each channel by itself: y[t] = sum over w of weight[w] * x[t - W + 1 + w] (+ bias), over a request's own tokens
    (zeros before the first), then out = y (`identity`) or silu(y). The state is the last V = W - 1 inputs."""
    ops.chosen("causal_conv")(x_TC, weight_WC, bias_C, gate, states_PVC, metadata, out_TC)


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
    """Mamba's scan (Gu and Dao, 2023), each channel by itself: with dt = softplus(dt), h[s] = exp(dt * a[s]) * h[s] +
    dt * b[s] * x and out = sum over s of c[s] * h[s] + d * x. a (negative) and d are float32."""
    ops.chosen("selective_scan")(x_TC, dt_TC, b_TS, c_TS, a_SC, d_C, states_PSC, metadata, out_TC)


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
    """Mamba-2's scan (Dao and Gu, 2024), each head by itself: with dt = softplus(dt + dt_bias) within its bounds,
    h = exp(dt * a) * h + dt * b (outer) x and out = c . h + d * x. Consecutive heads share a group's b and c."""
    ops.chosen("ssd_scan")(x_TNH, dt_TN, b_TGS, c_TGS, weights, states_PNSH, metadata, out_TNH)


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
    """The gated delta rule (Yang et al., 2024), each head by itself: queries and keys become unit vectors (1e-6 is added to
    the squared length), queries are divided by sqrt(S); h *= exp(weights.a * softplus(a + dt_bias)), or as `weights.floor`
    says; then h += k (outer) (v - k . h) * sigmoid(b) * beta_scale, and out = q . h. Consecutive heads share a query and key
    head. `a` may be [T, N, S]: then each number of a state's column decays by itself (Kimi Delta Attention, 2025)."""
    ops.chosen("gated_delta_rule")(q_TKS, k_TKS, v_TNH, a_TN, b_TN, weights, states_PNSH, metadata, out_TNH)


def rg_lru(
    x_TC: torch.Tensor,
    input_TC: torch.Tensor,
    forget_TC: torch.Tensor,
    weights: LruWeights,
    states_P1C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """The real-gated linear recurrent unit (De et al., 2024), each channel by itself: with log d = a * sigmoid(forget + bias),
    h = d * h + sqrt(1 - d^2) * sigmoid(input + bias) * x, and out = h. A request's first token has 1 in the square root's
    place."""
    ops.chosen("rg_lru")(x_TC, input_TC, forget_TC, weights, states_P1C, metadata, out_TC)


def wkv(
    k_TC: torch.Tensor,
    v_TC: torch.Tensor,
    decay_C: torch.Tensor,
    first_C: torch.Tensor,
    states_P3C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """RWKV-4's attention (Peng et al., 2023), each channel by itself: the mean of all values so far, weighted by exp(k), the
    token's own by exp(k + first); with each token earlier weights lose exp(decay), which is negative. float32 constants. A
    state is the weighted sum, the sum of weights, and the logarithm of what both are divided by."""
    ops.chosen("wkv")(k_TC, v_TC, decay_C, first_C, states_P3C, metadata, out_TC)


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
    """RMS norm over each `group` consecutive channels, with a gate: norm(x) * weight * f(gate) with `norm_first`, else
    norm(x * f(gate)) * weight; without a gate norm(x) * weight. f is one of `GATES`. weight is float32. `out` may be `x`."""
    ops.chosen("gated_norm")(x_TC, gate_TC, weight_C, eps, group, norm_first, out_TC, kind)


def gate(x_TC: torch.Tensor, gate_TC: torch.Tensor, kind: str, out_TC: torch.Tensor) -> None:
    """out = x * f(gate), with f one of `GATES`. A gate with fewer columns than x has one for so many consecutive columns
    (a head's). `out` may be `x` or, where it is as wide, `gate`."""
    ops.chosen("gate")(x_TC, gate_TC, kind, out_TC)


def scale_columns(x_TC: torch.Tensor, scale_C: torch.Tensor | None, out_TC: torch.Tensor) -> None:
    """out = x * scale, with a float32 factor a column, or just x. `out` may be `x`."""
    ops.chosen("scale_columns")(x_TC, scale_C, out_TC)
