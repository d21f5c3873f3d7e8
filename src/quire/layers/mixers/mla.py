"""Multi-head latent attention as a layer's mixer, in its absorbed form: queries are brought to the latent, attention goes over
the latents themselves, and what it gives is brought to the heads' values; and the same over tokens that an indexer chose. What
DeepSeek-V4 has in its place: attention to a window of tokens and to compressed ones.

Legend: T tokens, D hidden, N heads, Q values of a query head, V of a value head, R of the latent, E rotated ones, C = R + E,
U values of a head that do not rotate; of an index N heads, I values of a head, K chosen tokens, P pages, S tokens a page. Of
compressed attention H head size, W numbers of a token's row, E compressed tokens a page, V values of one, C columns.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.kernels import compressed, latent, ops, recurrent, sparse
from quire.kernels.norm import head_norm, scale_rows
from quire.kernels.types import Compressor, LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import growth_table, rotary_table, with_cache_scale
from quire.layers.mixers.interface import MixerLayer
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import MLA
from quire.models.variants import CompressedAttention, Indexer, SparseMLA


class MLALayer(MixerLayer):
    """Heads are shared out over ranks; every rank keeps the latents of all tokens."""

    can_fuse = True

    def __init__(self, mixer: MLA, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.mixer = mixer
        self.heads = context.plan.share(mixer.heads, "heads")
        self.rope = rotary_table(mixer.rope, context)
        self.columns = mixer.kv_rank + mixer.rope.rotary_dim
        self.params = AttentionParams(
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.columns,
            scale=_query_dim(mixer) ** -0.5 if mixer.scale is None else mixer.scale,
            latent=mixer.kv_rank,
            deterministic=context.deterministic,
        )
        # Of the wide buffer: queries (later the heads' values), the queries' latent, the latent, absorbed queries (later
        # gates).
        queries = self.heads * max(_query_dim(mixer), mixer.value_dim)
        gates = mixer.value_dim if mixer.output_gate else 0
        self._parts = (queries, mixer.q_rank, self.columns, self.heads * max(self.columns, gates))
        self.wide = sum(self._parts) + (self.heads if mixer.head_gate else 0)
        self.narrow = max(self.heads * max(mixer.kv_rank, mixer.value_dim), mixer.q_rank)
        self._growth_L = None if mixer.temperature is None else growth_table(mixer.temperature, context)
        self._kv_cache = torch.empty(0)
        self._group, self._kv_b = 0, ""

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: MLA) -> Iterator[Module]:
        queries = (RowBlock(mixer.heads * _query_dim(mixer), mixer.heads),)
        if mixer.q_rank:
            yield builder.linear("q_a", (RowBlock(mixer.q_rank, 1),), bias=mixer.in_bias)
            yield builder.norm("q_a_norm", mixer.norm, mixer.q_rank)
            yield builder.linear("q_b", queries, mixer.q_rank, shard="rows")
        else:
            yield builder.linear("q", queries, shard="rows")
        yield builder.linear("kv_a", (RowBlock(mixer.kv_rank + mixer.rope.rotary_dim, 1),), bias=mixer.in_bias)
        yield builder.norm("kv_a_norm", mixer.norm, mixer.kv_rank)
        keys_and_values = RowBlock(mixer.heads * (mixer.nope_dim + mixer.value_dim), mixer.heads)
        kv_b = builder.linear("kv_b", (keys_and_values,), mixer.kv_rank, shard="rows")
        yield dataclasses.replace(kv_b, absorbed=(mixer.nope_dim, mixer.value_dim))
        if mixer.head_gate:
            yield builder.linear("head_gate", (RowBlock(mixer.heads, mixer.heads),), shard="rows")
        values = mixer.heads * mixer.value_dim
        if mixer.output_gate:
            yield builder.linear("gate", (RowBlock(values, mixer.heads),), shard="rows")
        if mixer.sinks:
            yield builder.vector("sinks", RowBlock(mixer.heads, mixer.heads), "rows")
        yield builder.linear("out", (builder.hidden,), values, bias=mixer.out_bias, shard="columns", groups=mixer.heads)

    @staticmethod
    def attention_requests(
        mixer: MLA, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        return [
            AttentionRequest(
                num_heads=plan.share(mixer.heads, "heads"),
                num_kv_heads=1,
                head_dim=mixer.kv_rank + mixer.rope.rotary_dim,
                kv_dtype=kv_dtype,
                block_size=block_size,
                kind="mla",
                has_sinks=mixer.sinks,
                deterministic=deterministic,
                latent=mixer.kv_rank,
            )
        ]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context = self.context
        return [
            KVCacheSpec(
                kind=KVKind.MLA,
                block_size=context.block_size,
                bytes_per_token=self.columns * context.kv_dtype.itemsize,
                ranks=context.plan.context,
                num_kv_heads=1,
                head_dim=self.columns,
                dtype=str(context.kv_dtype).removeprefix("torch."),
            )
        ]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        (self._kv_cache,), (self._group,) = kv_caches, groups

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "kv_b" and isinstance(weight, LinearWeight):
            self._absorb(weight)
        elif name == "sinks":
            self.params = dataclasses.replace(self.params, sinks=weight)
        else:
            scale = {"q_a_norm": self.mixer.q_latent_scale, "kv_a_norm": self.mixer.kv_latent_scale}.get(name, 1.0)
            super().set_weight(name, weight)
            if scale != 1.0:
                self.norms[name] = NormWeight(self.norms[name].weight * scale)

    def set_cache_scale(self, name: str, scale: torch.Tensor) -> None:
        """Latents are keys and values at once, and have the keys' scale."""
        self.params = with_cache_scale(self.params, name, scale, self.context)

    def _absorb(self, weight: LinearWeight) -> None:
        """From the matrix that makes keys and values of a latent to one from queries to the latent, and one from what
        attention gives to values."""
        mixer, self._kv_b = self.mixer, weight.name
        heads_NCR = plain_columns(weight, self.context).view(mixer.kv_rank, self.heads, -1).permute(1, 2, 0)
        keys_NUR, values_NVR = heads_NCR.split((mixer.nope_dim, mixer.value_dim), dim=1)
        self.head_weights["to latent"] = latent.pack_heads(keys_NUR.transpose(1, 2))
        self.head_weights["to values"] = latent.pack_heads(values_NVR)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        out.multiply(self._attend(x.tensor(views), step, views), self.linears["out"], views)

    def _attend(self, x_TD: torch.Tensor, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """The heads' values [T, N * V]."""
        mixer, method, tokens = self.mixer, self.context.linear_method, len(x_TD)
        first_TC, q_latent_TC, latent_TC, absorbed_TC = views.side_by_side(*self._parts)
        q_TC = first_TC.view(-1)[: tokens * self.heads * _query_dim(mixer)].view(tokens, -1)
        self._query(x_TD, q_latent_TC, q_TC)
        method.apply(x_TD, self.linears["kv_a"], latent_TC)
        flat, heads = absorbed_TC.view(-1), (self.heads, -1)
        absorbed_TC = flat[: tokens * self.heads * self.columns].view(tokens, -1)
        q_TNQ, absorbed_TNC = q_TC.unflatten(1, heads), absorbed_TC.unflatten(1, heads)
        metadata, norm_R = step.attention[self._group], self.norms["kv_a_norm"].weight
        self._by_head("to latent", q_TNQ[..., : mixer.nope_dim], absorbed_TNC[..., : mixer.kv_rank])
        made = (q_TNQ[..., mixer.nope_dim :], latent_TC, norm_R, mixer.norm.eps, self.rope)

        def write(pages: torch.Tensor, described: AttentionMetadata) -> None:
            rotated_TNE = absorbed_TNC[..., mixer.kv_rank :]
            latent.latent_and_cache(*made, pages, described, rotated_TNE, self.params.k_scale)

        self.context.backend.keep(write, self._kv_cache, metadata)
        if self._growth_L is not None:
            scale_rows(absorbed_TC, self._growth_L, step.positions[:tokens])
        attended_TC = views.narrow(self.heads * mixer.kv_rank)
        self._attend_pages(x_TD, q_latent_TC, absorbed_TC, metadata, attended_TC)
        values_TC = first_TC.view(-1)[: tokens * self.heads * mixer.value_dim].view(tokens, -1)
        self._by_head("to values", attended_TC.unflatten(1, heads), values_TC.unflatten(1, heads))
        if mixer.head_gate:
            gate_TN = views.wide(self.wide).view(-1)[tokens * sum(self._parts) :].view(tokens, self.heads)
            method.apply(x_TD, self.linears["head_gate"], gate_TN)
            recurrent.gate(values_TC, gate_TN, "sigmoid", values_TC)
        if mixer.output_gate:
            gate_TC = flat[: values_TC.numel()].view(tokens, -1)
            method.apply(x_TD, self.linears["gate"], gate_TC)
            recurrent.gate(values_TC, gate_TC, "sigmoid", values_TC)
        return values_TC

    def _by_head(self, which: str, x_TNK: torch.Tensor, out_TNM: torch.Tensor) -> None:
        latent.head_linear(x_TNK, self.head_weights[which], out_TNM)
        self.context.linear_method.adapt_heads(f"{self._kv_b} {which}", x_TNK, out_TNM)

    def _query(self, x_TD: torch.Tensor, latent_TC: torch.Tensor, out_TC: torch.Tensor) -> None:
        """Queries, from the input or from their own latent."""
        method = self.context.linear_method
        if self.mixer.q_rank:
            method.apply(x_TD, self.linears["q_a"], latent_TC)
            ops.rms_norm(latent_TC, self.norms["q_a_norm"].weight, self.mixer.norm.eps, latent_TC)
            method.apply(latent_TC, self.linears["q_b"], out_TC)
        else:
            method.apply(x_TD, self.linears["q"], out_TC)

    def _attend_pages(
        self,
        x_TD: torch.Tensor,
        q_latent_TC: torch.Tensor,
        absorbed_TC: torch.Tensor,
        metadata: AttentionMetadata,
        out_TC: torch.Tensor,
    ) -> None:
        """Attention over the latents, this step's included, for absorbed queries; the layer's input and the queries' latent are
        there for those that choose tokens by them."""
        self.context.backend.forward(absorbed_TC, self._kv_cache, metadata, self.params, out_TC)


def plain_columns(weight: LinearWeight, context: LayerContext) -> torch.Tensor:
    """A matrix' columns as rows [in, out], whatever format it is in: they are the images of unit vectors."""
    if getattr(weight, "input_scale", None) is not None:  # made for real inputs, not for unit vectors
        weight = dataclasses.replace(weight, input_scale=None)  # type: ignore[call-arg]
    count, dtype = weight.in_features, context.activation_dtype
    units = torch.eye(count, dtype=dtype, device=context.device)
    columns_KN = torch.empty(count, weight.out_features, dtype=dtype, device=context.device)
    for start in range(0, count, context.max_tokens):
        rows = slice(start, min(start + context.max_tokens, count))
        context.linear_method.apply(units[rows], weight, columns_KN[rows])
    return columns_KN.to(context.dtype)


def _query_dim(mixer: MLA) -> int:
    return mixer.nope_dim + mixer.rope.rotary_dim


class SparseMLALayer(MLALayer):
    """Latent attention to the tokens that an indexer chose, its own or an earlier layer's (DeepSeek-V3.2, GLM-5, HunYuan 4).

    Index keys lie behind the latents of each page. While no context is longer than what may be chosen, attention is dense.
    Every rank chooses by itself, all the same; heads of attention are shared out."""

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
    def modules(builder: ModuleBuilder, mixer: MLA) -> Iterator[Module]:
        yield from MLALayer.modules(builder, mixer)
        if not isinstance(mixer, SparseMLA) or mixer.index_layer is not None:
            return
        indexer = cast(Indexer, mixer.indexer)
        yield builder.linear("index_q", (RowBlock(indexer.heads * indexer.head_dim, 1),), mixer.q_rank)
        yield builder.linear("index_k", (RowBlock(indexer.head_dim, 1),))
        yield builder.norm("index_k_norm", indexer.norm, indexer.head_dim)
        yield builder.linear("index_weights", (RowBlock(indexer.heads, 1),), plain=True)

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
        indexer, tokens, norm = self.indexer, len(x_TD), self.norms["index_k_norm"]
        has_choice = metadata.max_seq_len > indexer.top_k
        k_TI = self.multiply("index_k", x_TD)
        ops.layer_norm(k_TI, norm.weight, norm.bias, indexer.norm.eps, k_TI)
        q_TC = self.multiply("index_q", q_latent_TC) if has_choice else x_TD.new_empty(tokens, 0)
        q_TNI = q_TC.view(tokens, indexer.heads if has_choice else 0, indexer.head_dim)
        first = indexer.head_dim - indexer.rope.rotary_dim if indexer.rope_last else 0
        sparse.index_and_cache(q_TNI, k_TI, self._index_rope, first, self._index_PSI, metadata)
        if not has_choice:
            return None
        weights_TN = self.multiply("index_weights", x_TD)
        weights_TN.mul_((indexer.heads * indexer.head_dim) ** -0.5)
        return sparse.choose_tokens(q_TNI, weights_TN, self._index_PSI, metadata, indexer.top_k)


class CompressedAttentionLayer(MixerLayer):
    """Attention to a window of tokens and to compressed ones (DeepSeek-V4). Groups of heads are shared out over ranks; every rank
    keeps all tokens.

    What a token keeps while its window lasts lies in one group of pages, what compressors made of tokens in another."""

    def __init__(self, mixer: CompressedAttention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        if context.kv_dtype.itemsize < 2:
            raise ConfigError(
                f"kv_cache_dtype={context.kv_dtype}: compressed attention keeps pages in the model's own type",
                setting="kv_cache_dtype",
            )
        self.mixer, self.can_replay = mixer, False
        self.groups = context.plan.share(mixer.out_groups, "groups of heads")
        self.heads = mixer.heads // mixer.out_groups * self.groups
        self.rope = rotary_table(mixer.rope, context)
        self._ones_NH = torch.ones(self.heads, mixer.head_dim, device=context.device)
        # Columns of a row: the key, then values and weights of each compressor; one more where they are odd.
        self._vectors = 2 if mixer.overlaps else 1
        sizes = _compressed_sizes(mixer)
        self._widths = [mixer.head_dim, *(2 * self._vectors * size for size in sizes.values())]
        self._row = -(-sum(self._widths) // 2) * 2
        self._block, self._blocks_a_page = (
            sum(sizes.values()),
            -(-context.block_size // mixer.rate) if mixer.rate else 0,
        )
        self._rows, self._blocks_PEV = torch.empty(0), torch.empty(0)
        self._groups: tuple[int, ...] = ()
        self._compressors: list[Compressor] = []

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: CompressedAttention) -> Iterator[Module]:
        heads, rate = RowBlock(mixer.heads * mixer.head_dim, mixer.out_groups), mixer.rate
        yield builder.linear("q_a", (RowBlock(mixer.q_rank, 1),))
        yield builder.norm("q_a_norm", mixer.norm, mixer.q_rank)
        yield builder.linear("q_b", (heads,), mixer.q_rank, shard="rows")
        yield builder.linear("kv", (RowBlock(mixer.head_dim, 1),))
        yield builder.norm("kv_norm", mixer.norm, mixer.head_dim)
        yield builder.vector("sinks", RowBlock(mixer.heads, mixer.out_groups), "rows")
        for kind, size in _compressed_sizes(mixer).items():
            vectors = RowBlock(size * (2 if mixer.overlaps else 1), 1)
            yield builder.linear(f"{kind}_kv", (vectors,))
            yield builder.linear(f"{kind}_gate", (vectors,))
            yield builder.table(f"{kind}_bias", (RowBlock(rate, 1),), vectors.rows)
            yield builder.norm(f"{kind}_norm", mixer.norm, size)
        if mixer.indexer is not None:
            yield builder.linear("index_q", (RowBlock(mixer.indexer.heads * mixer.indexer.head_dim, 1),), mixer.q_rank)
            yield builder.linear("index_weights", (RowBlock(mixer.indexer.heads, 1),), plain=True)
        mixed = mixer.out_groups * mixer.out_rank
        out_a = builder.linear(
            "out_a", (RowBlock(mixed, mixer.out_groups),), heads.rows // mixer.out_groups, shard="rows"
        )
        yield dataclasses.replace(out_a, fixed="multiplies each group of heads by rows of its own")
        yield builder.linear("out", (builder.hidden,), mixed, shard="columns", groups=mixer.out_groups)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "out_a" and isinstance(weight, LinearWeight):
            plain_CM = plain_columns(weight, self.context)
            self.head_weights[name] = latent.pack_heads(plain_CM.t().reshape(self.groups, self.mixer.out_rank, -1))
            return
        super().set_weight(name, weight)
        self._compressors = []

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context, mixer = self.context, self.mixer
        dtype, size = str(context.kv_dtype).removeprefix("torch."), context.kv_dtype.itemsize
        rows = KVCacheSpec(
            kind=KVKind.SLIDING_WINDOW,
            block_size=context.block_size,
            bytes_per_token=self._row * size,
            num_kv_heads=1,
            head_dim=self._row // 2,
            dtype=dtype,
            window=max(mixer.window, mixer.rate * self._vectors),
        )
        if not mixer.rate:
            return [rows]
        values = -(-self._blocks_a_page * self._block // context.block_size)
        blocks = KVCacheSpec(
            kind=KVKind.MLA,
            block_size=context.block_size,
            bytes_per_token=values * size,
            num_kv_heads=1,
            head_dim=values,
            dtype=dtype,
        )
        return [rows, blocks]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        self._rows, *blocks = kv_caches
        self._groups = tuple(groups)
        if blocks:
            pages, shape = blocks[0], (blocks[0].shape[1], self._blocks_a_page, self._block)
            self._blocks_PEV = pages.as_strided(shape, (pages.stride(1), self._block, 1), pages.storage_offset())

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        mixer, x_TD, metadata = self.mixer, x.tensor(views), step.attention[self._groups[0]]
        tokens = len(x_TD)
        q_latent_TC = self.multiply("q_a", x_TD)
        ops.rms_norm(q_latent_TC, self.norms["q_a_norm"].weight, mixer.norm.eps, q_latent_TC)
        q_TC = self.multiply("q_b", q_latent_TC)
        head_norm(q_TC, self._ones_NH, None, mixer.norm.eps, subtract_mean=False)
        q_TNH = q_TC.view(tokens, self.heads, mixer.head_dim)
        positions_T = step.positions[:tokens]
        compressed.rotate_last(q_TNH, self.rope, positions_T)
        self._keep(x_TD, positions_T, metadata)
        attended_TNH = torch.empty_like(q_TNH)
        window = (q_TNH, self._rows, metadata, mixer.window, self.tensors["sinks"], attended_TNH)
        if mixer.rate:
            blocks_metadata = step.attention[self._groups[1]]
            for compressor in self._ready_compressors():
                compressed.compress(compressor, self._rows, metadata, self._blocks_PEV, blocks_metadata)
            chosen_TK = self._choose(x_TD, q_latent_TC, positions_T, blocks_metadata)
            compressed.window_attention(*window, self._blocks_PEV, blocks_metadata, mixer.rate, chosen_TK)
        else:
            compressed.window_attention(*window)
        compressed.rotate_last(attended_TNH, self.rope, positions_T, backwards=True)
        out.multiply(self._mix_groups(attended_TNH), self.linears["out"], views)

    def _keep(self, x_TD: torch.Tensor, positions_T: torch.Tensor, metadata: AttentionMetadata) -> None:
        key_TH = self.multiply("kv", x_TD)
        ops.rms_norm(key_TH, self.norms["kv_norm"].weight, self.mixer.norm.eps, key_TH)
        compressed.rotate_last(key_TH[:, None], self.rope, positions_T)
        names = [name for name in ("block_kv", "block_gate", "index_kv", "index_gate") if name in self.linears]
        parts = [key_TH, *(self.multiply(name, x_TD) for name in names)]
        rows_TW = x_TD.new_zeros(len(x_TD), self._row)
        torch.cat(parts, dim=1, out=rows_TW[:, : sum(self._widths)])
        compressed.keep_rows(rows_TW, self._rows, metadata)

    def _choose(
        self, x_TD: torch.Tensor, q_latent_TC: torch.Tensor, positions_T: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """The compressed tokens to attend to; None: all."""
        indexer = self.mixer.indexer
        if indexer is None or metadata.max_seq_len // self.mixer.rate <= indexer.top_k:
            return None
        q_TNI = self.multiply("index_q", q_latent_TC).view(len(x_TD), indexer.heads, indexer.head_dim)
        compressed.rotate_last(q_TNI, self.rope, positions_T)
        weights_TN = self.multiply("index_weights", x_TD)
        weights_TN.mul_((indexer.heads * indexer.head_dim) ** -0.5)
        return compressed.choose_blocks(q_TNI, weights_TN, self._blocks_PEV, metadata, self.mixer.rate, indexer.top_k)

    def _mix_groups(self, attended_TNH: torch.Tensor) -> torch.Tensor:
        """Each group's heads by a matrix of their own."""
        grouped_TGC = attended_TNH.reshape(len(attended_TNH), self.groups, -1)
        mixed_TGR = attended_TNH.new_empty(len(attended_TNH), self.groups, self.mixer.out_rank)
        latent.head_linear(grouped_TGC, self.head_weights["out_a"], mixed_TGR)
        return mixed_TGR.flatten(1)

    def _ready_compressors(self) -> list[Compressor]:
        if not self._compressors:
            mixer, column, first = self.mixer, self.mixer.head_dim, 0
            for name, size in _compressed_sizes(mixer).items():
                bias, norm = self.tensors[f"{name}_bias"], self.norms[f"{name}_norm"].weight
                self._compressors.append(
                    Compressor(column, size, mixer.rate, mixer.overlaps, bias, norm, mixer.norm.eps, self.rope, first)
                )
                column, first = column + 2 * self._vectors * size, first + size
        return self._compressors


def _compressed_sizes(mixer: CompressedAttention) -> dict[str, int]:
    """Values of what each of its compressors makes, by what the names of its modules begin with."""
    sizes = {"block": mixer.head_dim} if mixer.rate else {}
    return sizes if mixer.indexer is None else sizes | {"index": mixer.indexer.head_dim}
