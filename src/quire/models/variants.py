"""Parts that only some families are made of, as data: attention that shares or chooses.

Knows shapes and constants, as `spec.py` does.
"""

from __future__ import annotations

import dataclasses

from quire.kernels.types import Routing
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLA, Attention


@dataclasses.dataclass(frozen=True)
class SharedKV(Attention):
    """Attention with queries of its own over the keys and values of the layer `kv_layer`, which is before it and of the same
    heads and window. It keeps nothing."""

    kv_layer: int = 0


@dataclasses.dataclass(frozen=True)
class CrossAttention(Attention):
    """Attention with queries of its own over what the model's encoder has read: every token sees all of it.

    Attributes:
        length: rows of the longest that the encoder may read. They are as wide as the model.
    """

    length: int = 0


@dataclasses.dataclass(frozen=True)
class NarrowValues(Attention):
    """Attention whose values have fewer numbers than its keys."""

    value_dim: int = 0


@dataclasses.dataclass(frozen=True)
class ExpertAttention(Attention):
    """Attention whose queries and outputs come from the experts that a token chooses (JetMoE): each has a matrix for one query of
    every KV head and one for the way back; a token's outputs are weighted and added, and a vector is added to them."""

    routing: Routing = dataclasses.field(default_factory=lambda: Routing(1, 1))


@dataclasses.dataclass(frozen=True)
class DiffAttention(Attention):
    """Differential attention (https://arxiv.org/abs/2410.05258): query heads of the first half, minus a learned share of those of
    the second half, with keys of their own over values of two KV heads side by side; normed without weights.

    Attributes:
        start: of the share, before it is learned.
    """

    norm: RMSNorm = dataclasses.field(default_factory=lambda: RMSNorm(1e-6))
    start: float = 0.8


@dataclasses.dataclass(frozen=True)
class RelativeAttention(Attention):
    """Attention whose scores grow by a number for each distance (Inkling): a bank of `profiles` has one number for each of them
    and each distance below `extent`, and each head of a token has weights of its own for the profiles. Keys and values, and
    the outputs of attention and of the feed-forward behind it, go each through a convolution over `conv` tokens, which is
    added to what it reads.

    A `temperature` is of the biases too."""

    profiles: int = 0
    extent: int = 0
    conv: int = 4


@dataclasses.dataclass(frozen=True)
class BucketAttention(Attention):
    """Attention whose scores grow by a number of each head for each of so many `buckets` of distances, the last from `furthest`
    on (T5); if not causal, half of them are for keys behind the query. `table_layer`: whose numbers it reads; None: its own."""

    buckets: int = 32
    furthest: int = 128
    table_layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Which tokens a query attends to (DeepSeek-V3.2): the `top_k` with the largest sum over heads of weight * relu(q . k), where
    heads' queries come from the queries' latent, weights and one key a token from the layer's input.

    Attributes:
        norm: of the keys.
        rope_last: the rotated values are the last ones of a head rather than the first.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: Rope
    norm: LayerNorm
    rope_last: bool = False


@dataclasses.dataclass(frozen=True)
class SparseMLA(MLA):
    """Latent attention to chosen tokens.

    Attributes:
        index_layer: the layer before it whose choice it takes; None means that it has an indexer of its own.
    """

    indexer: Indexer | None = None
    index_layer: int | None = None


@dataclasses.dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one vector a token, key and value of all heads, within a window; and one for every `rate`
    tokens before it, all of them or those that an indexer chooses.

    Attributes:
        rope: of the last values of a head; taken back from what attention gives.
        window: tokens that are seen one by one, the own one included.
        q_rank: size of the queries' latent, which has a norm; queries have one without weights.
        out_groups, out_rank: heads go in groups through a matrix each to so many values, which one more matrix mixes.
        rate: tokens that become one; 0: none do. A learned softmax over them weighs each value by itself.
        overlaps: two vectors a token: one weighs in its own tokens', the other in the next ones'.
        indexer: chooses among the compressed; its keys are compressed alike.
    """

    heads: int
    head_dim: int
    rope: Rope
    window: int
    norm: RMSNorm
    q_rank: int
    out_groups: int
    out_rank: int
    rate: int = 0
    overlaps: bool = False
    indexer: BlockIndexer | None = None


@dataclasses.dataclass(frozen=True)
class BlockIndexer:
    """As `Indexer`, of compressed tokens: `top_k` of them with the largest sum over heads of weight * relu(q . k)."""

    heads: int
    head_dim: int
    top_k: int
