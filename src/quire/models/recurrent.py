"""Mixers that keep a state of fixed size instead of keys and values, as data: scans, delta rules, recurrences, convolutions.

Knows shapes and constants, as `spec.py` does.
"""

from __future__ import annotations

import dataclasses

from quire.models.residual import RMSNorm


@dataclasses.dataclass(frozen=True)
class Mamba:
    """Mamba's mixer: `channels` that decay each by itself, behind a convolution over `conv` tokens.

    Attributes:
        state: numbers a channel keeps.
        dt_rank: columns from which a matrix makes the time steps.
        norm: over time steps, B and C, each by itself; `norm_weights`: with weights.
    """

    channels: int
    state: int
    dt_rank: int
    conv: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm: RMSNorm | None = None
    norm_weights: bool = True


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """Mamba-2's mixer: heads with one decay each; `groups` of heads share B and C.

    Attributes:
        state: rows of a head's state, which has head_dim columns.
        dt_limits: bounds of the time steps.
        norm: over each of `norm_groups` parts of the heads' outputs; gated after it (`norm_first`) or before. None: a gate only.
        scales: multiply the columns of the first matrix: gate, inputs, B, C, time steps.
        out_scale: multiplies the output.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm: RMSNorm | None = None
    norm_groups: int = 1
    norm_first: bool = False
    scales: tuple[float, ...] | None = None
    out_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet's mixer: `heads` of values share `key_heads` of queries and keys; outputs are normed by head, then gated.

    Attributes:
        beta_scale: multiplies the strength of writes, a sigmoid.
    """

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    norm: RMSNorm
    conv: int = 4
    beta_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class KimiDelta:
    """Kimi Delta Attention: the gated delta rule in which each number of a head's state decays by itself; outputs are normed by
    head, then gated by a sigmoid.

    Attributes:
        head_dim: of queries, keys and values.
        decay_rank, gate_rank: columns between two matrices that make decays, and gates; 0: one matrix makes them.
        floor: lower bound of a decay's logarithm; 0 means none.
    """

    heads: int
    head_dim: int
    norm: RMSNorm
    conv: int = 4
    decay_rank: int = 0
    gate_rank: int = 0
    floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class Lightning:
    """Lightning attention: a head's state is the sum of its keys (outer) values, of which exp(decay) is left with each token;
    outputs are normed over all heads, then gated by a sigmoid.

    Attributes:
        decays: logarithms, negative, one a head.
    """

    heads: int
    head_dim: int
    decays: tuple[float, ...]
    norm: RMSNorm


@dataclasses.dataclass(frozen=True)
class RgLru:
    """Griffin's recurrent block: one branch goes through a convolution and a real-gated linear recurrent unit, whose two gates
    read the channels of their own head; the other, activated, is multiplied with what comes out.

    Attributes:
        channels: of all heads.
        act: of the other branch.
    """

    heads: int
    channels: int
    act: str
    conv: int = 4


@dataclasses.dataclass(frozen=True)
class TimeMix:
    """RWKV-4's attention: keys, values and a gate are made of each token mixed with the one before it; a channel's output is the
    weighted mean of its values so far, multiplied by the gate's sigmoid."""

    channels: int


@dataclasses.dataclass(frozen=True)
class ChannelMix:
    """RWKV-4's feed-forward: squared ReLUs and a gate that read each token mixed with the one before it."""

    intermediate: int


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """c * conv(b * x) over `conv` tokens, with b, c and x of one matrix."""

    conv: int
    bias: bool = False
