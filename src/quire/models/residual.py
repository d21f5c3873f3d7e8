"""The residual of a decoder, as data: its norms, where layers have them, and how what layers compute joins it.

Knows constants. Knows nothing of what the layers compute.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * (weight + weight_offset); without a weight just x / rms(x)."""

    eps: float
    weight_offset: float = 0.0
    weight: bool = True


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / std * (weight + weight_offset) + bias; a norm without weight has no bias either."""

    eps: float
    bias: bool = True
    weight_offset: float = 0.0
    weight: bool = True


Norm: TypeAlias = RMSNorm | LayerNorm


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a layer has norms, and whether its two halves read the same input.

    `before_*` norms the half's input, `after_*` its output before that joins the residual; `on_residual`: either norms the
    residual itself, with all that has joined it. `parallel`: both halves read the residual as it was before the layer; without
    `before_mlp` they share the first norm.
    """

    before_mixer: bool = True
    after_mixer: bool = False
    before_mlp: bool = True
    after_mlp: bool = False
    parallel: bool = False
    on_residual: bool = False


@dataclasses.dataclass(frozen=True)
class Joint:
    """How a half's output joins the residual: residual * keep + output * join; `learned`: the output is first multiplied by a
    vector of the checkpoint."""

    keep: float = 1.0
    join: float = 1.0
    learned: bool = False


PRE = Placement()
RESIDUAL_PRE = Placement(on_residual=True)
POST = Placement(before_mixer=False, after_mixer=True, before_mlp=False, after_mlp=True)
RESIDUAL_POST = Placement(before_mixer=False, after_mixer=True, before_mlp=False, after_mlp=True, on_residual=True)
SANDWICH = Placement(after_mixer=True, after_mlp=True)
PARALLEL = Placement(before_mlp=False, parallel=True)
PARALLEL_TWO_NORMS = Placement(parallel=True)


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """A short vector for each token and layer, made of the token's id and of its embedding; behind a layer's halves it is gated
    by the residual and joins it (per-layer inputs of Gemma 3n and 4): residual += norm(out(act(gate(residual)) * vector)).

    Attributes:
        width: of the vector.
        vocab: rows of the table of ids.
        norm: of the projected embeddings, and of what joins the residual.
        media_id: whose row of the table an image's or a sound's embeddings have.
    """

    width: int
    vocab: int
    act: str
    norm: RMSNorm
    media_id: int = 0


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Several residual streams (https://arxiv.org/abs/2512.24880): each half reads a weighted sum of them and its output is added
    to all, by weights that a matrix makes of the normed streams. Before the last norm they become one.

    Attributes:
        eps: is added to the weights of what is read (and `write_eps` to those of what is added).
        norm_eps: of the norm, which has no weights.
        magnitude: the most that an output is multiplied with.
        sinkhorn: rounds that make a matrix doubly stochastic, by which streams are mixed when an output joins; 0: they are not.
    """

    streams: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0
    write_eps: float = 0.0
    sinkhorn: int = 0
