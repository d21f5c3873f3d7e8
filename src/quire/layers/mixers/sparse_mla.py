"""Latent attention to the tokens that an indexer chose, its own or an earlier layer's (DeepSeek-V3.2, GLM-5, HunYuan 4).

Index keys lie behind the latents of each page. While no context is longer than what may be chosen, attention is dense.
Legend: T tokens, D hidden, N heads of the index, I values of an index head, K chosen tokens, C columns, P pages, S tokens a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec
from quire.kernels import ops, sparse
from quire.layers.mixers.attention import rotary_table
from quire.layers.mixers.interface import LayerContext, MixerLayer
from quire.layers.mixers.mla import MLALayer
from quire.layers.modules import LayerScope, Module, Part
from quire.models.spec import MLA
from quire.models.variants import Indexer, SparseMLA


class SparseMLALayer(MLALayer):
    """Every rank chooses by itself, all the same; heads of attention are shared out."""

    NAMES = MLALayer.NAMES | {"index_q", "index_k", "index_k_norm", "index_weights"}

    def __init__(self, mixer: SparseMLA, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.indexer = cast(Indexer, mixer.indexer)
        self._is_sparse = context.max_positions > self.indexer.top_k
        self._has_keys = self._is_sparse and mixer.index_layer is None
        self.can_replay = not self._is_sparse  # what is computed depends on the longest context
        self._index_rope = rotary_table(self.indexer.rope, context)
        self._owner: SparseMLALayer = self
        self._index_PSI = torch.empty(0)
        self.chosen_TK: torch.Tensor | None = None
        """The step's choice, for layers that take it; None where all tokens are attended to."""

    @staticmethod
    def modules(scope: LayerScope, mixer: MLA) -> Iterator[Module]:
        yield from MLALayer.modules(scope, mixer)
        if not isinstance(mixer, SparseMLA) or mixer.index_layer is not None:
            return
        indexer = cast(Indexer, mixer.indexer)
        yield scope.linear("index_q", (Part(indexer.heads * indexer.head_dim, 1),), mixer.q_rank)
        yield scope.linear("index_k", (Part(indexer.head_dim, 1),))
        yield scope.norm("index_k_norm", indexer.norm, indexer.head_dim)
        yield scope.linear("index_weights", (Part(indexer.heads, 1),), plain=True)

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        index_layer = cast(SparseMLA, self.mixer).index_layer
        if index_layer is not None:
            self._owner = cast(SparseMLALayer, layers[index_layer][0])

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        (spec,) = super().kv_cache_specs()
        index_bytes = self.indexer.head_dim * self.context.kv_dtype.itemsize if self._has_keys else 0
        return [msgspec.structs.replace(spec, bytes_per_token=spec.bytes_per_token + index_bytes)]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        super().bind_kv_cache(kv_caches, groups)
        if self._has_keys:
            pages, size, columns = self._kv_cache, self.context.block_size, self.indexer.head_dim
            shape, strides = (pages.shape[1], size, columns), (pages.stride(1), columns, 1)
            self._index_PSI = pages.as_strided(shape, strides, pages.storage_offset() + size * self.columns)

    def _attend_pages(
        self,
        x_TD: torch.Tensor,
        q_latent_TC: torch.Tensor,
        absorbed_TC: torch.Tensor,
        metadata: AttentionMetadata,
        out_TC: torch.Tensor,
    ) -> None:
        if self._has_keys:
            self.chosen_TK = self._choose(x_TD, q_latent_TC, metadata)
        chosen_TK = self._owner.chosen_TK
        if chosen_TK is None:
            super()._attend_pages(x_TD, q_latent_TC, absorbed_TC, metadata, out_TC)
        else:
            sparse.chosen_attention(absorbed_TC, self._kv_cache, metadata, self.params, chosen_TK, out_TC)

    def _choose(
        self, x_TD: torch.Tensor, q_latent_TC: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """Keep this step's index keys; the tokens that its queries choose, if any context has more than may be chosen."""
        indexer, method, tokens = self.indexer, self.context.linear_method, len(x_TD)
        has_choice = metadata.max_seq_len > indexer.top_k
        k_TI = x_TD.new_empty(tokens, indexer.head_dim)
        method.apply(x_TD, self.linears["index_k"], k_TI)
        norm = self.norms["index_k_norm"]
        ops.layer_norm(k_TI, norm.weight, norm.bias, indexer.norm.eps, k_TI)
        q_TC = x_TD.new_empty(tokens, indexer.heads * indexer.head_dim if has_choice else 0)
        if has_choice:
            method.apply(q_latent_TC, self.linears["index_q"], q_TC)
        q_TNI = q_TC.view(tokens, -1, indexer.head_dim) if has_choice else q_TC.view(tokens, 0, indexer.head_dim)
        first = indexer.head_dim - indexer.rope.rotary_dim if indexer.rope_last else 0
        sparse.index_and_cache(q_TNI, k_TI, self._index_rope, first, self._index_PSI, metadata)
        if not has_choice:
            return None
        weights_TN = x_TD.new_empty(tokens, indexer.heads)
        ops.linear(x_TD, self.linears["index_weights"], weights_TN)
        weights_TN.mul_((indexer.heads * indexer.head_dim) ** -0.5)
        return sparse.choose_tokens(q_TNI, weights_TN, self._index_PSI, metadata, indexer.top_k)
