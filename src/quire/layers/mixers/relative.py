"""Attention by distance between short convolutions, as a layer's mixer (Inkling).

Keys and values lie in one group of pages, the last inputs of four convolutions in another: of keys and values, of attention's
output, and of the output of the feed-forward behind it. A convolution is added to what it reads: its last weight is larger by 1.
Legend: T tokens, D hidden, N heads, H head size, R profiles, C columns.
"""

from collections.abc import Iterator, Sequence

import torch

from quire.attention.interface import AttentionParams
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.kernels import compressed, recurrent, relative
from quire.kernels.norm import head_norm, scale_rows
from quire.layers.assembly import Weight
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import growth_table
from quire.layers.mixers.interface import PagedState
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.residual import RMSNorm
from quire.models.variants import RelativeAttention

CONVOLUTIONS = ("kv_conv", "out_conv", "mlp_conv")


def check_pages(context: LayerContext) -> None:
    """Raises ConfigError: pages are in another type than these kernels read."""
    if context.kv_dtype.itemsize < 2:
        raise ConfigError(
            f"kv_cache_dtype={context.kv_dtype}: relative attention keeps pages in the model's own type",
            setting="kv_cache_dtype",
        )


class RelativeAttentionLayer(PagedState):
    """Heads are shared out over ranks. The convolution of attention's output is linear: each rank has that of its own part."""

    changes_mlp = True
    can_replay = False

    def __init__(self, mixer: RelativeAttention, context: LayerContext) -> None:
        check_pages(context)
        plan, size = context.plan, mixer.head_dim
        self.heads, self.kv_heads = plan.share(mixer.heads, "heads"), plan.share(mixer.kv_heads, "KV heads")
        self._row, last = 2 * self.kv_heads * size, mixer.conv - 1
        super().__init__(mixer, context, (last, self._row), (last, context.hidden), (last, context.hidden))
        self.mixer = mixer
        self._columns = (self.heads * size, self.heads * mixer.profiles, self._row)
        self.wide, self.narrow = sum(self._columns), self.heads * size
        self.params = AttentionParams(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=size,
            scale=size**-0.5 if mixer.scale is None else mixer.scale,
            window=mixer.window,
            deterministic=context.deterministic,
        )
        self._growth_L = None if mixer.temperature is None else growth_table(mixer.temperature, context)
        self._kv_cache, self._kv_group = torch.empty(0), 0

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: RelativeAttention) -> Iterator[Module]:
        size, norm = mixer.head_dim, mixer.qk_norm
        q, kv = (RowBlock(heads * size, heads) for heads in (mixer.heads, mixer.kv_heads))
        mix = RowBlock(mixer.heads * mixer.profiles, mixer.heads)
        yield builder.linear("qkv", (q, mix, kv, kv), shard="rows")
        yield builder.table("kv_conv", (kv, kv), mixer.conv, shard="rows", is_conv=True)
        if norm is not None:
            yield builder.norm("q_norm", norm, size)
            yield builder.norm("k_norm", norm, size)
        yield builder.table("relative", (RowBlock(mixer.profiles, 1),), mixer.extent)
        yield builder.linear("out", (builder.hidden,), q.rows, shard="columns", groups=mixer.heads)
        for name in ("out_conv", "mlp_conv"):
            yield builder.table(name, (builder.hidden,), mixer.conv, is_conv=True)

    def set_weight(self, name: str, weight: Weight) -> None:
        if name in CONVOLUTIONS and isinstance(weight, torch.Tensor):
            weight = weight.clone()
            weight[:, -1] += 1.0
        elif name == "relative" and isinstance(weight, torch.Tensor):
            weight = torch.nn.functional.pad(weight, (0, 1))  # no score grows by a distance beyond the table
        super().set_weight(name, weight)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        context = self.context
        pages = KVCacheSpec(
            kind=KVKind.SLIDING_WINDOW if self.mixer.window else KVKind.FULL,
            block_size=context.block_size,
            bytes_per_token=self._row * context.kv_dtype.itemsize,
            num_kv_heads=1,
            head_dim=self._row // 2,
            dtype=str(context.kv_dtype).removeprefix("torch."),
            window=self.mixer.window,
        )
        return [pages, *super().kv_cache_specs()]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        self._kv_cache, *states = kv_caches
        self._kv_group, *state_groups = groups
        super().bind_kv_cache(states, state_groups)

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        size, metadata = self.mixer.head_dim, step.attention[self._kv_group]
        projected_TC, attended_TC = views.wide(self.wide), views.narrow(self.narrow)
        x.multiply(self.linears["qkv"], projected_TC, views)
        q_TC, mix_TC, raw_TC = projected_TC.split(self._columns, dim=1)
        kv_TC = torch.empty_like(raw_TC, memory_format=torch.contiguous_format)
        self._convolve("kv_conv", raw_TC, step, kv_TC)
        self._norm("q_norm", q_TC, self.heads)
        self._norm("k_norm", kv_TC[:, : self._row // 2], self.kv_heads)
        if self._growth_L is not None:
            for part_TC in (q_TC, mix_TC):
                scale_rows(part_TC, self._growth_L, step.positions[: len(q_TC)])
        compressed.keep_rows(kv_TC, self._kv_cache, metadata)
        relative.relative_attention(
            q_TC.unflatten(1, (self.heads, size)),
            mix_TC.unflatten(1, (self.heads, self.mixer.profiles)),
            self.tensors["relative"],
            self._kv_cache,
            metadata,
            self.params,
            attended_TC.unflatten(1, (self.heads, size)),
        )
        self._convolve("out_conv", self.multiply("out", attended_TC), step, out.tensor(views))

    def change_mlp(self, step: StepInputs, delta_TD: torch.Tensor) -> None:
        self._convolve("mlp_conv", delta_TD.clone(), step, delta_TD)

    def _convolve(self, name: str, x_TC: torch.Tensor, step: StepInputs, out_TC: torch.Tensor) -> None:
        weight_WC, states = self.tensors[name], self.states[CONVOLUTIONS.index(name)]
        recurrent.causal_conv(x_TC, weight_WC, None, "identity", states, self.metadata(step), out_TC)

    def _norm(self, name: str, x_TC: torch.Tensor, heads: int) -> None:
        norm = self.mixer.qk_norm
        if isinstance(norm, RMSNorm):
            head_norm(x_TC, self.norms[name].weight.expand(heads, -1).contiguous(), None, norm.eps, subtract_mean=False)
