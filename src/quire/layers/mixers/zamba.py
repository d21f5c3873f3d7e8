"""Zamba2's layers as mixers: Mamba-2, in some layers on x + t, where t is what a transformer makes of x and the embeddings.

A few transformers (blocks) serve all layers that have one, each layer with an adapter of its own. A block's weights belong to the
first layer that has it; the others find them there.
Legend: T tokens, D hidden, I intermediate of the block's feed-forward, R columns of an adapter.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from quire.attention.interface import AttentionRequest
from quire.config.kv_spec import KVCacheSpec
from quire.kernels import ops, recurrent
from quire.layers.activation import kernel_activation
from quire.layers.half import HalfInput, HalfOutput
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers.attention import AttentionLayer
from quire.layers.mixers.mamba import Mamba2Layer
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews
from quire.models.spec import SharedBlock, Zamba


class _Room:
    """Buffers of all layers in turn, for the largest step."""

    def __init__(self, context: LayerContext, block: SharedBlock | None) -> None:
        def buffer(columns: int) -> torch.Tensor:
            return torch.zeros(context.max_tokens, columns, dtype=context.activation_dtype, device=context.device)

        intermediate, rank = (0, 0) if block is None else (_width(block, context.plan), block.adapter_rank)
        self.embeddings_TD, self.input_TD, self.hidden_TD = (buffer(context.hidden) for _ in range(3))
        self.pair_T2D, self.low_TR = buffer(2 * context.hidden), buffer(rank)
        self.gate_up_T2I, self.adapted_T2I = buffer(2 * intermediate), buffer(2 * intermediate)
        heads = 2 * context.hidden // context.plan.size if block is not None and block.adapts_attention else 0
        self.one_T2D, self.qkv_T6D = buffer(heads), buffer(3 * heads)


class ZambaLayer(Mamba2Layer):
    """One layer, norms included. Ranks share a block's heads and its feed-forward's width; their parts of each half's output are
    summed at once, for what follows reads all of it."""

    can_stage = False  # the embeddings, and blocks that other layers own

    def __init__(self, mixer: Zamba, context: LayerContext) -> None:
        super().__init__(mixer.mamba, context)
        self.can_fuse, self.zamba, self.attention = False, mixer, None
        if "zamba room" not in context.tables:
            context.tables["zamba room"] = _Room(context, mixer.shape)
        self._room: _Room = context.tables["zamba room"]
        block = mixer.block
        if block is not None:
            self.attention = AttentionLayer(block.attention, context)
            self.wide = max(self.wide, self.attention.wide)
            self.narrow = max(self.narrow, self.attention.narrow, _width(block, context.plan))
            self._activation = kernel_activation(block.mlp.act)
            self._owner: ZambaLayer = context.tables.setdefault(("zamba", block.owner), self)

    @staticmethod
    def modules(builder: ModuleBuilder, mixer: Zamba) -> Iterator[Module]:
        block = mixer.block
        within = "" if block is None else "mamba_decoder."
        own = [builder.table("zamba_norm", (builder.hidden,)), *Mamba2Layer.modules(builder, mixer.mamba)]
        yield from (_moved(module, builder.layer, within) for module in own)
        if block is None:
            return
        attention, wide = block.attention, RowBlock(block.mlp.intermediate, block.mlp.intermediate)
        if block.owner == builder.layer:
            q, kv = (RowBlock(heads * attention.head_dim, heads) for heads in (attention.heads, attention.kv_heads))
            yield builder.table("block_norm", (RowBlock(2 * builder.hidden.rows, 1),))
            yield builder.linear("block_qkv", (q, kv, kv), 2 * builder.hidden.rows, shard="rows")
            yield builder.linear("block_out", (builder.hidden,), q.rows, shard="columns", groups=attention.heads)
            yield builder.table("block_mlp_norm", (builder.hidden,))
            yield builder.linear("block_gate_up", (wide, wide), bias=block.mlp.bias, shard="rows")
            yield builder.linear(
                "block_down", (builder.hidden,), wide.rows, bias=block.mlp.bias, shard="columns", groups=wide.groups
            )
        low, head = RowBlock(block.adapter_rank, 1), RowBlock(2 * builder.hidden.rows, attention.heads)
        adapters = [
            builder.linear("block_adapter_in", (low,)),
            builder.linear("block_adapter_out", (wide, wide), low.rows, shard="rows"),
        ]
        for name in "qkv" if block.adapts_attention else "":
            adapters.append(builder.linear(f"block_{name}_adapter_in", (low,), head.rows))
            adapters.append(builder.linear(f"block_{name}_adapter_out", (head,), low.rows, shard="rows"))
        for module in adapters:
            (source,) = module.sources
            source = source.format(index=block.index).replace(f"layers.{builder.layer}.", f"layers.{block.owner}.", 1)
            yield dataclasses.replace(module, sources=(source,))
        yield builder.linear("block_linear", (builder.hidden,))

    @staticmethod
    def attention_requests(
        mixer: Zamba, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        if mixer.block is None:
            return []
        return AttentionLayer.attention_requests(mixer.block.attention, kv_dtype, block_size, plan, deterministic)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [*super().kv_cache_specs(), *([] if self.attention is None else self.attention.kv_cache_specs())]

    def bind_kv_cache(self, kv_caches: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        super().bind_kv_cache(kv_caches[:1], groups[:1])
        if self.attention is not None:
            self.attention.bind_kv_cache(kv_caches[1:], groups[1:])

    def run(self, x: HalfInput, out: HalfOutput, step: StepInputs, views: TokenViews) -> None:
        room, eps, x_TD = self._room, self.zamba.norm.eps, x.tensor(views)
        input_TD = room.input_TD[: len(x_TD)]
        if self.zamba.is_first:
            recurrent.scale_columns(x_TD, None, room.embeddings_TD[: len(x_TD)])
        if self.zamba.block is None:
            ops.rms_norm(x_TD, self.tensors["zamba_norm"], eps, input_TD)
        else:
            self._run_block(x_TD, input_TD, room, step, views)
            ops.add(x_TD, input_TD)
            ops.rms_norm(input_TD, self.tensors["zamba_norm"], eps, input_TD)
        super().run(HalfInput(self.context.linear_method, lambda views: input_TD), out, step, views)

    def _run_block(
        self, x_TD: torch.Tensor, out_TD: torch.Tensor, room: _Room, step: StepInputs, views: TokenViews
    ) -> None:
        """out = t, before it joins x."""
        owner, linears, method, count = self._owner, self.linears, self.context.linear_method, len(x_TD)
        attention, block, eps = (
            cast(AttentionLayer, self.attention),
            cast(SharedBlock, self.zamba.block),
            self.zamba.norm.eps,
        )
        pair_T2D, hidden_TD, low_TR = room.pair_T2D[:count], room.hidden_TD[:count], room.low_TR[:count]
        gate_up_T2I, adapted_T2I = room.gate_up_T2I[:count], room.adapted_T2I[:count]
        recurrent.scale_columns(x_TD, None, pair_T2D[:, : x_TD.shape[1]])
        recurrent.scale_columns(room.embeddings_TD[:count], None, pair_T2D[:, x_TD.shape[1] :])
        ops.rms_norm(pair_T2D, owner.tensors["block_norm"], eps, pair_T2D)
        qkv_TC, attended_TNH = views.wide(attention.wide), views.narrow(attention.narrow)
        method.apply(pair_T2D, owner.linears["block_qkv"], qkv_TC)
        if block.adapts_attention:
            one_T2D, three_T6D = room.one_T2D[:count], room.qkv_T6D[:count]
            for name, part_T2D in zip("qkv", three_T6D.chunk(3, dim=1), strict=True):
                method.apply(pair_T2D, linears[f"block_{name}_adapter_in"], low_TR)
                method.apply(low_TR, linears[f"block_{name}_adapter_out"], one_T2D)
                recurrent.scale_columns(one_T2D, None, part_T2D)
            ops.add(three_T6D, qkv_TC)
        attention._attend(step, qkv_TC, attended_TNH)
        method.apply(attended_TNH, owner.linears["block_out"], hidden_TD)
        self.context.communicator.all_reduce(hidden_TD)
        ops.rms_norm(hidden_TD, owner.tensors["block_mlp_norm"], eps, hidden_TD)
        method.apply(hidden_TD, owner.linears["block_gate_up"], gate_up_T2I)
        method.apply(hidden_TD, linears["block_adapter_in"], low_TR)
        method.apply(low_TR, linears["block_adapter_out"], adapted_T2I)
        ops.add(adapted_T2I, gate_up_T2I)
        activated_TI = views.narrow(_width(block, self.context.plan))
        ops.gated_activation(gate_up_T2I, self._activation, activated_TI)
        method.apply(activated_TI, owner.linears["block_down"], hidden_TD)
        self.context.communicator.all_reduce(hidden_TD)
        method.apply(hidden_TD, linears["block_linear"], out_TD)


def _width(block: SharedBlock, plan: ParallelPlan) -> int:
    """Of the feed-forward on one rank."""
    return block.mlp.intermediate // plan.size


def _moved(module: Module, layer: int | None, within: str) -> Module:
    """The module with a further prefix within the layer for its sources."""
    start = f"layers.{layer}."
    return dataclasses.replace(
        module, sources=tuple(start + within + source.removeprefix(start) for source in module.sources)
    )
