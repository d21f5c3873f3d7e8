"""Attention that differs from grouped-query attention before or after the pages (as `models/variants.py` describes it).

Legend: T tokens, S tokens of one expert, E distances, or rows of an encoder, D hidden (or the encoder's width), N query heads,
K KV heads (or experts a token), H head size, W = 2 * H, C columns.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import msgspec
import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.kernels import compressed, ops, relative
from quire.kernels.norm import head_norm
from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.expert_set import by_expert
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import AttentionLayer, rotary_table
from quire.layers.mixers.interface import MixerLayer
from quire.layers.mixers.relative import check_pages
from quire.layers.modules import Module, ModuleBuilder, RowBlock, SourceLayout
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import Attention
from quire.models.variants import (
    BucketAttention,
    CrossAttention,
    DiffAttention,
    ExpertAttention,
    NarrowValues,
    SharedKV,
)


class QueryLayer(AttentionLayer):
    """Attention whose matrix makes queries alone: keys and values come from elsewhere."""

    def __init__(self, mixer: Attention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self._columns = self.wide = self.narrow

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        queries = RowBlock(mixer.heads * mixer.head_dim, mixer.heads)
        yield builder.linear("q", (queries,), bias=mixer.qkv_bias, shard="rows")
        if mixer.qk_norm is not None:
            yield builder.norm("q_norm", mixer.qk_norm, mixer.head_dim)
        yield builder.linear(
            "out", (builder.hidden,), queries.rows, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def set_weight(self, name: str, weight: Weight) -> None:
        super().set_weight("qkv" if name == "q" else name, weight)


class SharedKVLayer(QueryLayer):
    """Queries over another layer's keys and values (Gemma 3n and 4's last layers).

    Pages, their group and the constants of attention are the owner's."""

    def __init__(self, mixer: SharedKV, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self._owner: AttentionLayer = self

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        (owner,) = layers[cast(SharedKV, self.mixer).kv_layer]
        self._owner = cast(AttentionLayer, owner)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "q_norm":
            self.norms["k_norm"] = cast(NormWeight, weight)  # which no key has
        super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return []

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        """It has no pages of its own."""

    def _pages(self, step: StepInputs) -> tuple[torch.Tensor, AttentionMetadata, AttentionParams]:
        return self._owner._pages(step)

    def _rotate_and_cache(self, step: StepInputs, qkv_TC: torch.Tensor) -> None:
        kv_cache, metadata, params = self._pages(step)
        only_queries, norms = dataclasses.replace(params, num_kv_heads=0), self._prepare_heads(qkv_TC)
        self.context.backend.rope_and_cache(qkv_TC, kv_cache, metadata, only_queries, self.rope, *norms)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        self._rotate_and_cache(step, qkv_TC)
        self.context.backend.forward(qkv_TC, *self._pages(step), out_TNH)


class NarrowValuesLayer(AttentionLayer):
    """Attention whose values are narrower than its keys (MiMo-V2-Flash). Pages hold values with zeros behind them."""

    def __init__(self, mixer: NarrowValues, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.can_fuse = self.can_narrow = False
        self._value_dim = mixer.value_dim

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        value_dim = cast(NarrowValues, mixer).value_dim
        sizes = ((mixer.heads, mixer.head_dim), (mixer.kv_heads, mixer.head_dim), (mixer.kv_heads, value_dim))
        parts = tuple(RowBlock(heads * size, heads) for heads, size in sizes)
        yield builder.linear("qkv", parts, bias=mixer.qkv_bias, shard="rows")
        if mixer.sinks:
            yield builder.vector("sinks", RowBlock(mixer.heads, mixer.heads), "rows")
        columns = mixer.heads * value_dim
        yield builder.linear(
            "out", (builder.hidden,), columns, bias=mixer.out_bias, shard="columns", groups=mixer.heads
        )

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        x_TD, size, value_dim = x.tensor(views), self.mixer.head_dim, self._value_dim
        tokens = len(x_TD)
        heads, kv_heads = self.params.num_heads, self.params.num_kv_heads
        keyed = (heads + kv_heads) * size
        projected_TC = self.multiply("qkv", x_TD)
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        qkv_TC[:, :keyed] = projected_TC[:, :keyed]
        values_TKH = qkv_TC[:, keyed:].unflatten(1, (kv_heads, size))
        values_TKH[..., :value_dim] = projected_TC[:, keyed:].unflatten(1, (kv_heads, value_dim))
        values_TKH[..., value_dim:] = 0.0
        self._attend(step, qkv_TC, attended_TC)
        given_TC = attended_TC.view(tokens, heads, size)[..., :value_dim].reshape(tokens, -1)
        out.multiply(given_TC, self.linears["out"], views)
        if self.mixer.out_scale != 1.0:
            ops.scale_and_cap(out.tensor(views), self.mixer.out_scale, 0.0)


LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DiffAttentionLayer(AttentionLayer):
    """Differential attention (DiffLlama): two maps of scores over the same values, the second taken away from the first.

    Pages hold heads of twice the size: keys with zeros behind them, and two KV heads' values side by side, for both halves of
    keys. Ranks have the same heads of both halves."""

    def __init__(self, mixer: DiffAttention, context: LayerContext) -> None:
        super().__init__(_widened(mixer), context)
        self.rope = None if mixer.rope is None else rotary_table(mixer.rope, context)
        self.can_fuse = self.can_narrow = False
        self._diff = mixer
        groups = self.params.num_heads // 2
        self._gain_NW = torch.full((groups, 2 * mixer.head_dim), 1.0 - mixer.start, device=context.device)
        self._share = 0.0

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        q, kv = (RowBlock(heads // 2 * mixer.head_dim, heads // 2) for heads in (mixer.heads, mixer.kv_heads))
        parts, layouts = (q, q, kv, kv, kv, kv), (SourceLayout((0, 1)), SourceLayout((2, 3)), SourceLayout((4, 5)))
        yield builder.linear("qkv", parts, bias=mixer.qkv_bias, shard="rows", layouts=layouts)
        for name in LAMBDAS:
            yield builder.vector(name, RowBlock(mixer.head_dim, 1))
        pairs = mixer.heads // 2
        yield builder.linear("out", (builder.hidden,), 2 * q.rows, bias=mixer.out_bias, shard="columns", groups=pairs)

    @staticmethod
    def shares(mixer: Attention, plan: ParallelPlan) -> tuple[int, int]:
        pairs, kv_pairs = (
            plan.share(mixer.heads // 2, "pairs of heads"),
            plan.share(mixer.kv_heads // 2, "pairs of KV heads"),
        )
        return 2 * pairs, 2 * kv_pairs

    @classmethod
    def attention_requests(
        cls, mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        wide = _widened(cast(DiffAttention, mixer))
        return super().attention_requests(wide, kv_dtype, block_size, plan, deterministic)

    def set_weight(self, name: str, weight: Weight) -> None:
        super().set_weight(name, weight)
        if name in LAMBDAS and all(each in self.tensors for each in LAMBDAS):
            q1_H, k1_H, q2_H, k2_H = (self.tensors[each].float() for each in LAMBDAS)
            self._share = float((q1_H @ k1_H).exp() - (q2_H @ k2_H).exp()) + self._diff.start

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        x_TD, size = x.tensor(views), self._diff.head_dim
        tokens = len(x_TD)
        heads, kv_heads = self.params.num_heads, self.params.num_kv_heads
        projected_TC = self.multiply("qkv", x_TD)
        keyed_TNH = projected_TC.view(tokens, -1, size)
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        qkv_TNW = qkv_TC.view(tokens, -1, 2 * size)
        qkv_TNW.zero_()
        qkv_TNW[:, : heads + kv_heads, :size] = keyed_TNH[:, : heads + kv_heads]
        first_TKH, second_TKH = keyed_TNH[:, heads + kv_heads :].chunk(2, dim=1)
        qkv_TNW[:, heads + kv_heads :] = torch.cat((first_TKH, second_TKH), dim=-1).repeat(1, 2, 1)
        self._attend(step, qkv_TC, attended_TC)
        plus_TC, minus_TC = attended_TC.chunk(2, dim=1)
        difference_TC = plus_TC - self._share * minus_TC
        head_norm(difference_TC, self._gain_NW, None, self._diff.norm.eps, subtract_mean=False)
        out.multiply(difference_TC, self.linears["out"], views)


def _widened(mixer: DiffAttention) -> DiffAttention:
    """What pages and backends are told of it."""
    return dataclasses.replace(mixer, head_dim=2 * mixer.head_dim, scale=mixer.head_dim**-0.5)


class ExpertAttentionLayer(AttentionLayer):
    """Attention whose queries and outputs come from experts (JetMoE): a token's k-th expert makes each KV head's k-th query.

    Experts run one after the other, in the model's own number type. KV heads are shared out over ranks, and each expert's
    matrices with them."""

    def __init__(self, mixer: ExpertAttention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.can_fuse = self.can_narrow = self.can_replay = False
        self._routing, self._experts = mixer.routing, dict[str, list[LinearWeight]]()

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        experts, kv = cast(ExpertAttention, mixer).routing.num_experts, mixer.kv_heads * mixer.head_dim
        heads = RowBlock(kv, mixer.kv_heads)
        yield builder.linear("kv", (heads, heads), shard="rows")
        yield builder.linear("q_router", (RowBlock(experts, 1),), plain=True)
        q_experts = builder.experts("q_experts", experts, (heads,), shard="rows")
        out = builder.experts("out_experts", experts, (builder.hidden,), kv, shard="columns", groups=mixer.kv_heads)
        yield from (dataclasses.replace(each, plain=True) for each in (q_experts, out))
        yield builder.vector("out_bias", builder.hidden)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name in ("q_experts", "out_experts"):
            if self.context.plan.expert_parallel:
                raise ConfigError(
                    "experts of attention are split by heads, not shared out", setting="enable_expert_parallel"
                )
            listed = [ops.pack_linear(each) for each in cast(torch.Tensor, weight)]
            self._experts[name] = listed
        elif name == "out_bias" and self.context.plan.rank > 0:  # outputs are summed over ranks: one adds it
            super().set_weight(name, torch.zeros_like(cast(torch.Tensor, weight)))
        else:
            super().set_weight(name, weight)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        x_TD, heads, size, top_k = x.tensor(views), self.params.num_kv_heads, self.mixer.head_dim, self._routing.top_k
        tokens = len(x_TD)
        qkv_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        qkv_TC[:, self.narrow :] = self.multiply("kv", x_TD)
        ids_TK, weights_TK = self._choose(x_TD, step)
        queries_TKC = x_TD.new_zeros(tokens, top_k, heads * size)
        for expert, token, k in by_expert(ids_TK):
            queries_TKC[token, k] = self._multiply("q_experts", expert, x_TD[token])
        queries_TKNH = queries_TKC.view(tokens, top_k, heads, size)
        qkv_TC[:, : self.narrow] = queries_TKNH.transpose(1, 2).flatten(1)
        self._attend(step, qkv_TC, attended_TC)
        given_TKC = attended_TC.view(tokens, heads, top_k, size).transpose(1, 2).flatten(2)
        out.tensor(views).copy_(self.tensors["out_bias"].expand(tokens, -1))
        for expert, token, k in by_expert(ids_TK):
            given_SD = self._multiply("out_experts", expert, given_TKC[token, k])
            out.tensor(views).index_add_(0, token, given_SD * weights_TK[token, k, None].to(given_SD.dtype))

    def _choose(self, x_TD: torch.Tensor, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(x_TD), self._routing.top_k)
        logits_TE = torch.empty(len(x_TD), self._routing.num_experts, device=x_TD.device)
        ids_TK = torch.zeros(shape, dtype=torch.int32, device=x_TD.device)
        weights_TK = torch.zeros(shape, device=x_TD.device)
        self.context.linear_method.apply(x_TD, self.linears["q_router"], logits_TE)
        ops.moe_route(logits_TE, self._routing, step.attention[0].shape, ids_TK, weights_TK)
        return ids_TK, weights_TK

    def _multiply(self, name: str, expert: int, x_SK: torch.Tensor) -> torch.Tensor:
        weight = self._experts[name][expert]
        out_SM = x_SK.new_empty(len(x_SK), weight.out_features)
        ops.linear(x_SK.contiguous(), weight, out_SM)
        return out_SM


class CrossAttentionLayer(QueryLayer):
    """Queries over what an encoder has read beside the prompt.

    Keys and values are written when it has run, and read in every step. They never grow."""

    can_stage: ClassVar[bool] = False

    def __init__(self, mixer: CrossAttention, context: LayerContext) -> None:
        super().__init__(mixer, context)
        self.can_narrow = True
        self._length = mixer.length

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        keys = RowBlock(mixer.kv_heads * mixer.head_dim, mixer.kv_heads)
        yield builder.linear("kv", (keys, keys), bias=mixer.qkv_bias, shard="rows")
        yield from QueryLayer.modules(builder, mixer)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        (spec,) = super().kv_cache_specs()
        return [msgspec.structs.replace(spec, kind=KVKind.CROSS, window=self._length)]

    def keep(self, rows_ED: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write keys and values of what the encoder has read to these slots."""
        kv_EC = self.multiply("kv", rows_ED)
        only_keys, nothing = dataclasses.replace(self.params, num_heads=0), slots_E[:0].int()
        metadata = AttentionMetadata(
            self.context.block_size, nothing, nothing, nothing, nothing, slots_E, nothing, nothing, len(slots_E)
        )
        self.context.backend.rope_and_cache(kv_EC, self._kv_cache, metadata, only_keys, None)

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        self.context.backend.forward(qkv_TC, *self._pages(step), out_TNH)

    def _rotate_and_cache(self, step: StepInputs, qkv_TC: torch.Tensor) -> None:
        """Its keys and values are there."""


class BucketAttentionLayer(AttentionLayer):
    """Attention whose scores grow by a learned number for each head and bucket of distances (T5).

    The numbers become a table by distance when they are loaded; a layer without its own reads another's."""

    can_replay = False
    can_stage = False

    def __init__(self, mixer: BucketAttention, context: LayerContext) -> None:
        check_pages(context)
        super().__init__(mixer, context)
        self.can_narrow = False
        self._buckets, self._owner = mixer, self

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Attention) -> Iterator[Module]:
        yield from AttentionLayer.modules(builder, mixer)
        buckets = cast(BucketAttention, mixer)
        if buckets.table_layer is None:
            yield builder.table("buckets", (RowBlock(buckets.buckets, 1),), mixer.heads)

    @classmethod
    def attention_requests(
        cls, mixer: Attention, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        return []

    def see_layers(self, layers: Sequence[Sequence[MixerLayer]]) -> None:
        if self._buckets.table_layer is not None:
            (owner,) = layers[self._buckets.table_layer]
            self._owner = cast(BucketAttentionLayer, owner)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name == "buckets" and isinstance(weight, torch.Tensor):
            mine = weight[:, self.context.plan.groups(self.mixer.heads, "heads")]
            weight = mine[buckets_by_distance(self._buckets).to(mine.device)]
        super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        (spec,) = super().kv_cache_specs()
        return [msgspec.structs.replace(spec, num_kv_heads=1, head_dim=spec.num_kv_heads * spec.head_dim)]

    def _attend(self, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        kv_cache, metadata, params = self._pages(step)
        size = self.mixer.head_dim
        compressed.keep_rows(qkv_TC[:, self.narrow :], kv_cache, metadata)
        relative.relative_attention(
            qkv_TC[:, : self.narrow].unflatten(1, (-1, size)),
            None,
            self._owner.tensors["buckets"],
            kv_cache,
            metadata,
            params,
            out_TNH.unflatten(1, (-1, size)),
        )


def buckets_by_distance(mixer: BucketAttention) -> torch.Tensor:
    """[E]: the bucket of each distance of a query from its key: 0 to `furthest`, or `-furthest` to it if not causal.

    The first half of the buckets (of a direction's) have a distance each, the others grow with the logarithm."""
    furthest = mixer.furthest
    distance_E = torch.arange(0 if mixer.causal else -furthest, furthest + 1)
    count = mixer.buckets if mixer.causal else mixer.buckets // 2
    exact, far_E = count // 2, distance_E.abs()
    growth_E = torch.log(far_E.clamp(min=1).float() / exact) / math.log(furthest / exact) * (count - exact)
    bucket_E = torch.where(far_E < exact, far_E, (exact + growth_E.long()).clamp(max=count - 1))
    return bucket_E if mixer.causal else bucket_E + (distance_E < 0) * count
