"""Attention backends: who computes attention over pages, and the batch description that they read.

Legend: T tokens of the step, B requests of the step, N query heads, K KV heads, H head size, P pages a row may have,
R rows.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from quire.config.kv_spec import KVCacheSpec

SHORT_TOKENS = 128
"""Tokens up to which a step's short queries, all together, are split over their keys where a backend can, behind at least
`LONG_CONTEXT` cached tokens each. On an H200 (heads of 128, 32 query and 8 KV heads) 128 tokens behind 32,768 take 299 us split
and 412 whole, 256 take 551 and 410; `bench/results/h200-short-queries.json`."""
LONG_CONTEXT = 2048


@dataclasses.dataclass
class AttentionMetadata:
    """One KV group's description of the step's batch. The tensors are persistent (allocated once at their largest size,
    filled in place by input preparation), so that a recorded step keeps pointing at them; only the integers change.

    Attributes:
        query_start: int32 [max_B + 1]; request b's tokens are query_start[b] to query_start[b + 1] - 1.
        seq_lens: int32 [max_B]; tokens in the request's context, this step's included.
        rows: int32 [max_B]; request b's row in `block_table`.
        block_table: int32 [R, P]; page ids of a row, in order of position (0 = null page).
        slot_mapping: int64 [max_T]; page * block_size + offset where token t's keys and values are written.
        positions: int32 [max_T].
        shape: int64 [4]: num_tokens, num_requests, max_query_len, max_seq_len; what native kernels read at run time.
        num_tokens, num_requests, max_query_len, max_seq_len: bounds for launching. On a device whose steps are captured
            as graphs they are the graph's sizes, and a step may have less (max_seq_len is then the longest a request may
            ever be): kernels that run there read `shape`, `query_start` and `seq_lens` on the device, where requests
            beyond the step's own have query_start equal to num_tokens and seq_lens 0, and slots beyond its tokens are -1.
        decodes: whether a request may compute a single token.
        seen_end: int32 [max_T]; in layers that see items whole, each token also sees those behind itself that stand before this
            position, as far as theirs is the same; None for a step without items.
        short_tokens: requests that compute 2 to so many tokens behind at least `LONG_CONTEXT` may be split over their keys;
            0: the step has none.
        parts: what `context_parallel.py` makes of it.
    """

    block_size: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    shape: torch.Tensor
    num_tokens: int = 0
    num_requests: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    decodes: bool = True
    short_tokens: int = 0
    seen_end: torch.Tensor | None = None
    parts: Any = None


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """What a layer needs of a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    block_size: int
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    kind: str = "full"
    deterministic: bool = False
    causal: bool = True
    chunk: int = 0
    latent: int = 0
    sees_items: bool = False

    def __str__(self) -> str:
        """What is asked for, without what is not."""
        heads = f"{self.num_heads} query and {self.num_kv_heads} KV heads of {self.head_dim}"
        pages = f"pages of {self.block_size} tokens in {str(self.kv_dtype).removeprefix('torch.')}"
        named = ("window", "soft_cap", "has_sinks", "has_alibi", "chunk", "latent", "deterministic", "sees_items")
        wanted = [f"{name}={value}" for name in named if (value := getattr(self, name))]
        return ", ".join([f"{self.kind}: {heads}", pages, *wanted, *([] if self.causal else ["not causal"])])


@dataclasses.dataclass(frozen=True)
class Supports:
    """An answer with its reason."""

    yes: bool
    why: str = ""


@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """One layer's constants.

    Attributes:
        causal: a token sees itself and those before it; without it every token of its request that is in the pages (an
            encoder computes a request in one step).
        window: how far it sees: itself and the window - 1 tokens before it; not causal: window // 2 tokens to either side.
            0 means all.
        chunk: it sees only tokens of its own chunk of so many; 0 means all. For causal layers.
        alibi_slopes: float32 [N]; a score grows by slope * (key's position - query's position).
        latent: a value is the first so many columns of its key, and that wide is a head's output; 0 means that values are a
            plane of the pages.
        sees_items: a causal token also sees what `AttentionMetadata.seen_end` says: the rest of the image that it is of.
        sinks: [N]; one more score of each softmax, whose value is zero.
        k_scale, v_scale: pages in fp8 hold keys and values divided by these (latents by the first); 1 in other pages.
        deterministic: a token's result must be the same to the bit in any batch and any chunking of its prompt.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    deterministic: bool = False
    causal: bool = True
    chunk: int = 0
    latent: int = 0
    sees_items: bool = False

    @property
    def value_dim(self) -> int:
        """Size of a value, and of a head's output."""
        return self.latent or self.head_dim

    @property
    def sight(self) -> int:
        """How many tokens the last of a request sees at most, itself included, by its window; 0 means all."""
        return self.window if self.causal or self.window == 0 else self.window // 2 + 1


Write = Callable[[torch.Tensor, AttentionMetadata], None]
"""Writes a step's keys and values into pages."""


class AttentionBackend(abc.ABC):
    """Computes attention of new tokens over pages. Owns the cache's layout.

    Attributes:
        name: what users call it.
        only_when_named: it is not chosen unless a user names it.
        page_dimension: of what `allocate` returns, the dimension that counts pages.
    """

    name: str
    only_when_named: bool = False
    page_dimension: int = 1

    @classmethod
    @abc.abstractmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        """Whether this backend can serve such a layer, and why not."""

    @abc.abstractmethod
    def allocate(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
        """One layer tensor of `num_blocks` pages, zeroed. Layout: [2, num_blocks, K, block_size, H] for the built-in ones."""

    @abc.abstractmethod
    def view(self, raw: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        """A layer's pages within bytes [num_blocks, page bytes] that layers of other kinds share: as `allocate` gives them,
        but with other strides. A page's bytes may be more than the layer needs. Of `KVKind.MLA` keys and values are the same
        memory."""

    @abc.abstractmethod
    def reshaped(self, pages: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
        """What `allocate` gave for layers with as many bytes a page, for a layer whose heads are others in number and size."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Called once a step for each description of it, before any layer; for what all layers share. The runner of devices
        that work beside the host calls it, within what is captured."""

    @abc.abstractmethod
    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        rope: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """What comes before `forward`: norm query and key heads (if weights are given), rotate them (`rope`: a
        `kernels.types.Rope` or None), and write this step's keys and values into the pages, whose layout is the backend's."""

    def keep(self, write: "Write", kv_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Have another kernel than `rope_and_cache`'s write this step's keys and values: to the slots of the description that it
        is given with the pages."""
        write(kv_cache, metadata)

    @abc.abstractmethod
    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """Attention of the step's queries, [T, N * H] in the first columns of `qkv` [T, (N + 2K) * H], over the pages
        (this step's keys and values are already written there) into `out` [T, N * H] (of latent pages: N * latent)."""

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
        rope: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """`rope_and_cache`, then `forward`; a backend overrides it where both can be one kernel. This is what a model calls.
        `qkv` may be overwritten."""
        self.rope_and_cache(qkv, kv_cache, metadata, params, rope, q_norm, k_norm, eps)
        self.forward(qkv, kv_cache, metadata, params, out)
