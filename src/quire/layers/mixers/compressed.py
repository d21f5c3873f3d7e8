"""Attention to a window of tokens and to compressed ones, as a layer's mixer (DeepSeek-V4).

What a token keeps while its window lasts lies in one group of pages, what compressors made of tokens in another.
Legend: T tokens, D hidden, N heads, H head size, W numbers of a token's row, I values of an index head, P pages, E compressed
tokens a page, V values of one, C columns.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.kernels import compressed, latent, ops
from quire.kernels.norm import head_norm
from quire.kernels.types import Compressor, LinearWeight
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import rotary_table
from quire.layers.mixers.interface import MixerLayer
from quire.layers.mixers.mla import plain_columns
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.variants import CompressedAttention


class CompressedAttentionLayer(MixerLayer):
    """Groups of heads are shared out over ranks; every rank keeps all tokens."""

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
        sizes = [mixer.head_dim] * bool(mixer.rate) + ([mixer.indexer.head_dim] if mixer.indexer is not None else [])
        self._widths = [mixer.head_dim, *(2 * self._vectors * size for size in sizes)]
        self._row = -(-sum(self._widths) // 2) * 2
        self._block, self._blocks_a_page = sum(sizes), -(-context.block_size // mixer.rate) if mixer.rate else 0
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
        kinds = [("block", mixer.head_dim)] * bool(rate)
        if mixer.indexer is not None:
            kinds.append(("index", mixer.indexer.head_dim))
        for kind, size in kinds:
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
        q_latent_TC = self._multiply("q_a", x_TD)
        ops.rms_norm(q_latent_TC, self.norms["q_a_norm"].weight, mixer.norm.eps, q_latent_TC)
        q_TC = self._multiply("q_b", q_latent_TC)
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
        key_TH = self._multiply("kv", x_TD)
        ops.rms_norm(key_TH, self.norms["kv_norm"].weight, self.mixer.norm.eps, key_TH)
        compressed.rotate_last(key_TH[:, None], self.rope, positions_T)
        names = [name for name in ("block_kv", "block_gate", "index_kv", "index_gate") if name in self.linears]
        parts = [key_TH, *(self._multiply(name, x_TD) for name in names)]
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
        q_TNI = self._multiply("index_q", q_latent_TC).view(len(x_TD), indexer.heads, indexer.head_dim)
        compressed.rotate_last(q_TNI, self.rope, positions_T)
        weights_TN = x_TD.new_empty(len(x_TD), indexer.heads)
        self.context.linear_method.apply(x_TD, self.linears["index_weights"], weights_TN)
        weights_TN.mul_((indexer.heads * indexer.head_dim) ** -0.5)
        return compressed.choose_blocks(q_TNI, weights_TN, self._blocks_PEV, metadata, self.mixer.rate, indexer.top_k)

    def _mix_groups(self, attended_TNH: torch.Tensor) -> torch.Tensor:
        """Each group's heads by a matrix of their own."""
        grouped_TGC = attended_TNH.reshape(len(attended_TNH), self.groups, -1)
        mixed_TGR = attended_TNH.new_empty(len(attended_TNH), self.groups, self.mixer.out_rank)
        latent.head_linear(grouped_TGC, self.head_weights["out_a"], mixed_TGR)
        return mixed_TGR.flatten(1)

    def _multiply(self, name: str, x_TK: torch.Tensor) -> torch.Tensor:
        weight = self.linears[name]
        out_TM = x_TK.new_empty(len(x_TK), weight.out_features)
        self.context.linear_method.apply(x_TK, weight, out_TM)
        return out_TM

    def _ready_compressors(self) -> list[Compressor]:
        if not self._compressors:
            mixer, column, first = self.mixer, self.mixer.head_dim, 0
            sizes = {"block": mixer.head_dim} | ({"index": mixer.indexer.head_dim} if mixer.indexer is not None else {})
            for name, size in sizes.items():
                bias, norm = self.tensors[f"{name}_bias"], self.norms[f"{name}_norm"].weight
                self._compressors.append(
                    Compressor(column, size, mixer.rate, mixer.overlaps, bias, norm, mixer.norm.eps, self.rope, first)
                )
                column, first = column + 2 * self._vectors * size, first + size
        return self._compressors
