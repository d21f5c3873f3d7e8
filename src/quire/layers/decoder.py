"""The one module that runs any `DecoderSpec`.

Knows the order of a layer's operations and which buffers they use; every arithmetic operation is a kernel, every matrix
belongs to a `LinearMethod`, and pages belong to the attention backend. Knows nothing of devices, requests or files.

Legend: T tokens of the step, S positions that need logits, D hidden, V vocabulary, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import torch

from quire.attention.interface import AttentionBackend, AttentionRequest
from quire.config.kv_spec import KVCacheSpec
from quire.distributed.communicator import Communicator, SingleRank
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.assembly import Assembler, NormWeight, Sliceable, Weight
from quire.layers.decoder_layer import DecoderLayer, modules_of, norm_places
from quire.layers.describe import describe_pages, describe_weights
from quire.layers.feed_forward import FeedForwardLayer
from quire.layers.hyper import HyperConnection
from quire.layers.interface import CausalLM, ModelContext, StepInputs
from quire.layers.layer_end import LayerEnd, LayerInputs
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.layers.mixers import LayerContext, MixerLayer, NarrowViews, kind_of
from quire.layers.parallel import ParallelPlan
from quire.layers.workspace import TokenViews, Workspace
from quire.models.residual import PRE, HyperConnections, LayerNorm, Norm, RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, MoE


class Decoder(CausalLM):
    """A model made from a spec.

    Args:
        dtype: type of the weights.
        kv_dtype: type of keys and values in their pages.
        block_size: tokens a page.
        max_tokens, max_logits: the largest step.
        max_positions: length of the rotary tables; None means the spec's.
        activation_dtype: type of the buffers between layers; None means `dtype`.
        attention_backend: computes attention; made for layers as `attention_requests` lists them.
        linear_method: format of the matrices.
        plan: this rank's share.
        communicator: sums over ranks; needed where the plan has more than one.
        deterministic: a request's logits must be the same to the bit in any batch.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        max_tokens: int,
        max_logits: int,
        attention_backend: AttentionBackend,
        device: torch.device | None = None,
        activation_dtype: torch.dtype | None = None,
        max_positions: int | None = None,
        linear_method: LinearMethod | None = None,
        plan: ParallelPlan | None = None,
        communicator: Communicator | None = None,
        deterministic: bool = False,
    ) -> None:
        self.spec, self.plan = spec, plan or ParallelPlan()
        self.communicator, self.deterministic = communicator or SingleRank(), deterministic
        self.dtype, self.kv_dtype, self.block_size = dtype, kv_dtype, block_size
        self.device = device or torch.device("cpu")
        self.attention_backend = attention_backend
        self.linear_method = linear_method or UnquantizedLinear()
        self.max_positions = _check_positions(spec, max_positions)
        self.modules = modules_of(spec)
        self.sources = weight_table.sources_of(self.modules, spec, self.plan, self.linear_method)
        # Checkpoints were trained with the factor in their own number type (Gemma's square root is not exact in bfloat16).
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self._embedding: LinearWeight | None = None
        self._positions: LinearWeight | None = None
        self._token_types: LinearWeight | None = None
        self._lm_head: LinearWeight | None = None
        self._tied_head: LinearWeight | None = None
        self._lm_head_bias: torch.Tensor | None = None
        self._embedding_norm: NormWeight | None = None
        self._final_norm: NormWeight | None = None
        self._project_in: LinearWeight | None = None
        self._project_out: LinearWeight | None = None
        self._hyper_head = None if spec.hyper is None else HyperConnection(spec.hyper, is_head=True)
        self._inputs = None if spec.layer_input is None else LayerInputs(spec, dtype, self.linear_method)
        self._layers = self._build_layers(max_tokens, activation_dtype or dtype)
        mlps = [layer.mlp for layer in self._layers]
        self._takes_late = {mlp for before, mlp in itertools.pairwise(mlps) if mlp and before and before.is_late}
        self._give_weightless_norms()
        self._is_fused = self._can_fuse()
        eps = spec.final_eps if spec.final_eps is not None else spec.norm.eps
        self._last_norm = dataclasses.replace(spec.norm, eps=eps)
        self._can_narrow = self._narrows()
        self.can_replay = all(mixer.can_replay for mixer in self._mixers())
        self.workspace = self._build_workspace(max_tokens, max_logits, activation_dtype or dtype)
        for layer in self._layers:
            if layer.mlp is not None:
                layer.mlp.reserve(self.workspace)

    @classmethod
    def from_context(cls, spec: DecoderSpec, context: ModelContext) -> Decoder:
        """A decoder of some spec, made from what every model is made from."""
        return cls(
            spec,
            dtype=context.dtype,
            kv_dtype=context.kv_dtype,
            block_size=context.block_size,
            max_tokens=context.max_tokens,
            max_logits=context.max_logits,
            max_positions=context.max_positions,
            device=context.device,
            activation_dtype=context.activation_dtype,
            attention_backend=context.backend,
            linear_method=context.linear_method,
            plan=context.plan,
            communicator=context.communicator,
            deterministic=context.deterministic,
        )

    @property
    def buffer_bytes(self) -> int:
        return self.workspace.num_bytes

    # What the layers keep.

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [spec for mixer in self._mixers() for spec in mixer.kv_cache_specs()]

    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        start = 0
        for mixer in self._mixers():
            end = start + len(mixer.kv_cache_specs())
            mixer.bind_kv_cache(kv_caches[start:end], group_of_layer[start:end])
            start = end

    def _mixers(self) -> Iterator[MixerLayer]:
        return (mixer for layer in self._layers for mixer in layer.mixers)

    # Weights.

    def follow_names(self, names: Collection[str]) -> None:
        """Expect matrices as a checkpoint with these names has them: experts each by itself or all in one tensor, in a plain
        type or in the format's."""
        self.linear_method.see_names(weight_table.names_within(names, self.spec))
        self.modules = weight_table.with_layout_of(self.modules, self.spec, names)
        self.sources = weight_table.sources_of(self.modules, self.spec, self.plan, self.linear_method, names)

    def load_weights(self, weights: Iterable[tuple[str, Sliceable]]) -> None:
        """One streaming pass. A rank slices what it is given, so that something lazily read from a file is read in part.

        Raises:
            ConfigError: names are missing or unknown; lists both.
        """
        self.take_weights(self.assemble(weights))

    def take_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Finished weights, by module."""
        for name, weight in weights:
            self._set_weight(name, weight)

    def assemble(self, weights: Iterable[tuple[str, Sliceable]]) -> Iterator[tuple[str, Weight]]:
        """(module, weight), each as soon as its last part came; raises as `load_weights`."""
        assembler = Assembler(self.sources, self.plan, self.dtype, self.device, self.linear_method)
        unexpected: list[str] = []
        seen: list[str] = []
        for name, tensor in weights:
            canonical = weight_table.canonical_name(name, self.sources, self.spec)
            if canonical in self.sources:
                seen.append(canonical)
                finished = assembler.add(canonical, tensor)
                if finished is not None:
                    yield finished[0].name, finished[1]
            elif not weight_table.is_ignored(name, self.spec):
                unexpected.append(name)
            for module in weight_table.cache_scales(name, self.spec):
                yield module, tensor[()]
        if unexpected or assembler.missing():
            weight_table.check_names(self.sources, self.spec, seen + unexpected)

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module.startswith("layers."):
            _, index, name = module.split(".")
            self._layers[int(index)].set_weight(name, weight)
        elif self._hyper_head is not None and module.startswith("hyper_head"):
            self._hyper_head.set_weight(module, weight)
        elif self._inputs is not None and module in self._inputs.NAMES:
            self._inputs.set_weight(module, weight)
        else:
            setattr(self, f"_{module}", weight)

    # One step.

    def forward(self, step: StepInputs) -> torch.Tensor:
        count, spec = step.num_tokens, self.spec
        views = self.workspace.tokens(count)
        self._embed(step, views)
        if self._positions is not None:
            ops.add_embedding(step.positions[:count], self._positions, views.residual_TD)
        if self._token_types is not None:
            ops.add_embedding(cast(torch.Tensor, step.token_types)[:count], self._token_types, views.residual_TD)
        if self._embedding_norm is not None:
            norm = cast(Norm, spec.embedding_norm)
            self._apply_norm(norm, self._embedding_norm, views.residual_TD, views.residual_TD, None)
        if self._inputs is not None:
            self._inputs.run(step.input_ids[:count], views.residual_TD, self.workspace.inputs(count))
        if self._hyper_head is not None:
            return self._run_streams(self._hyper_head, step, views)
        is_narrow = step.sampled is not None and self._can_narrow
        layers = self._layers[:-1] if is_narrow else self._layers
        if self._is_fused:
            for layer in layers:
                self._run_fused(layer, step, views)
            return self._run_last_fused(step, views) if is_narrow else views.residual_TD
        has_delta = False
        for layer in layers:
            run_layer = self._run_parallel if layer.placement.parallel else self._run_sequential
            has_delta = run_layer(layer, step, views, has_delta)
        if is_narrow:
            return self._run_last(step, views, has_delta)
        if has_delta:
            ops.add(views.delta_TD, views.residual_TD, spec.residual_scale)
        return views.residual_TD

    def compute_hidden(self, step: StepInputs) -> torch.Tensor:
        views = self.workspace.tokens(step.num_tokens)
        if self._final_norm is None:
            return views.residual_TD
        self._apply_norm(self._last_norm, self._final_norm, views.residual_TD, views.normed_TD, None)
        return views.normed_TD

    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        spec = self.spec
        gathered_SD, logits_SV = self.workspace.logits(step.num_logits)
        if step.sampled is None or not self._can_narrow:
            residual_TD = self.workspace.tokens(step.num_tokens).residual_TD
            ops.gather_rows(residual_TD, step.logits_index[: step.num_logits], gathered_SD)
        if self._final_norm is not None:
            self._apply_norm(self._last_norm, self._final_norm, gathered_SD, gathered_SD, None)
        if self._project_out is not None:
            gathered_SD, projected_SD = self.workspace.projected(step.num_logits, spec.embedding_width), gathered_SD
            self.linear_method.apply(projected_SD, self._project_out, gathered_SD)
        self._apply_head(gathered_SD, logits_SV)
        if spec.logits_scale != 1.0 or spec.logits_soft_cap > 0:
            ops.scale_and_cap(logits_SV, spec.logits_scale, spec.logits_soft_cap)
        return logits_SV

    def _embed(self, step: StepInputs, views: TokenViews) -> None:
        ids_T, table, scale = (
            step.input_ids[: step.num_tokens],
            cast(LinearWeight, self._embedding),
            self._embedding_scale,
        )
        if self._project_in is None:
            ops.embedding(ids_T, table, views.residual_TD, scale)
        else:
            embedded = self.workspace.projected(step.num_tokens, self.spec.embedding_width)
            ops.embedding(ids_T, table, embedded, scale)
            self.linear_method.apply(embedded, self._project_in, views.residual_TD)

    def _apply_head(self, gathered_SD: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """All logits on every rank: each computes those of its tokens, if its head is a part of the whole."""
        head = self._head()
        if head.out_features == self.spec.vocab:
            self.linear_method.apply(gathered_SD, head, logits_SV)
            return
        shares_RSW = self.workspace.shares(len(logits_SV), self.plan.size)
        mine_SW = shares_RSW[self.plan.rank]
        if head.out_features < mine_SW.shape[1]:  # the last rank has fewer tokens, the gather's rows are of one length
            narrow_SW = self.workspace.narrow_share(len(logits_SV), head.out_features)
            self.linear_method.apply(gathered_SD, head, narrow_SW)
            mine_SW[:, : head.out_features].copy_(narrow_SW)
        else:
            self.linear_method.apply(gathered_SD, head, mine_SW)
        self.communicator.all_gather(mine_SW, shares_RSW)
        for rank, share_SW in enumerate(shares_RSW):
            tokens = ParallelPlan(self.plan.size, rank).vocabulary(self.spec.vocab)
            logits_SV[:, tokens].copy_(share_SW[:, : tokens.stop - tokens.start])

    def _head(self) -> LinearWeight:
        """The matrix of logits: this rank's rows of it where it has no more, or where they can be had without a copy."""
        if not self.spec.tied_embeddings:
            return cast(LinearWeight, self._lm_head)
        if self._tied_head is None:
            whole = self._tied_head = dataclasses.replace(cast(LinearWeight, self._embedding), bias=self._lm_head_bias)
            if self.plan.size > 1 and whole.data is not None:
                rows = self.plan.vocabulary(self.spec.vocab)
                count, bias = rows.stop - rows.start, None if whole.bias is None else whole.bias[rows]
                self._tied_head = LinearWeight(count, whole.in_features, whole.dtype, whole.data[rows], bias=bias)
        return self._tied_head

    def _run_fused(self, layer: DecoderLayer, step: StepInputs, views: TokenViews) -> None:
        """As `_run_sequential` for plain pre-norm layers: norms, activations and residuals are the matrices' own business.

        Over several ranks the residual itself is summed: rank 0 adds its part to it, the others put theirs in its place."""
        eps = cast(RMSNorm, self.spec.norm).eps
        for mixer in layer.mixers:
            mixer.run_normed(layer.norms["before_mixer"].weight, eps, step, views)
            self.communicator.all_reduce(views.residual_TD)
        self._run_fused_mlp(layer, step, views)

    def _run_fused_mlp(self, layer: DecoderLayer, step: StepInputs, views: TokenViews) -> None:
        if layer.mlp is not None:
            eps = cast(RMSNorm, self.spec.norm).eps
            layer.mlp.run_normed(layer.norms["before_mlp"].weight, eps, step, views)
            self.communicator.all_reduce(views.residual_TD)

    def _narrow_views(self, step: StepInputs, views: TokenViews) -> NarrowViews:
        count, columns = step.num_logits, self._layers[-1].mixers[0].wide
        return NarrowViews(views, self.workspace.samples(count), self.workspace.sampled(count, columns))

    def _run_last_fused(self, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """As `_run_fused`, but only tokens that need logits come through: their residual [S, D]."""
        eps, layer, narrow = cast(RMSNorm, self.spec.norm).eps, self._layers[-1], self._narrow_views(step, views)
        layer.mixers[0].run_normed_narrow(layer.norms["before_mixer"].weight, eps, step, narrow)
        residual_SD = narrow.sampled.residual_TD
        if not len(residual_SD):
            return residual_SD
        self.communicator.all_reduce(residual_SD)
        self._run_fused_mlp(layer, cast(StepInputs, step.sampled), narrow.sampled)
        return residual_SD

    def _run_last(self, step: StepInputs, views: TokenViews, has_delta: bool) -> torch.Tensor:
        """As `_run_sequential`, but only tokens that need logits come through: their residual [S, D]."""
        layer, narrow = self._layers[-1], self._narrow_views(step, views)
        few = narrow.sampled
        normed_TD = self._read_residual(layer, "before_mixer", views, has_delta)
        layer.mixers[0].run_narrow(normed_TD, few.delta_TD, step, narrow)
        if not len(few.residual_TD):
            return few.residual_TD
        self.communicator.all_reduce(few.delta_TD)
        ops.gather_rows(views.residual_TD, step.logits_index[: step.num_logits], few.residual_TD)
        has_delta = self._norm_output(layer, "after_mixer", few)
        if self._run_second_half(layer, cast(StepInputs, step.sampled), few, has_delta):
            ops.add(few.delta_TD, few.residual_TD, self.spec.residual_scale)
        return few.residual_TD

    def _run_sequential(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, has_delta: bool) -> bool:
        """The mixer, then the feed-forward on a residual that has seen the mixer's output. Returns whether the delta is still
        to be added to the residual."""
        if layer.mixers:
            normed = self._read_residual(layer, "before_mixer", views, has_delta)
            self._run_mixers(layer, step, views, normed)
            has_delta = self._norm_output(layer, "after_mixer", views)
        return self._run_second_half(layer, step, views, has_delta)

    def _run_second_half(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, has_delta: bool) -> bool:
        """The feed-forward, and what follows a layer's halves. Returns whether the delta is still to be added."""
        if layer.mlp is not None:
            normed = self._read_residual(layer, "before_mlp", views, has_delta)
            self._run_mlp(layer.mlp, step, views, normed, views.delta_TD)
            has_delta = self._norm_output(layer, "after_mlp", views)
        return has_delta if layer.end is None else self._end_layer(layer.end, views, has_delta)

    def _run_streams(self, head: HyperConnection, step: StepInputs, views: TokenViews) -> torch.Tensor:
        """All layers on several residual streams, which become one at the end."""
        streams_TND = self.workspace.streams(step.num_tokens)
        streams_TND.copy_(views.residual_TD[:, None].expand_as(streams_TND))
        for layer in self._layers:
            for half, hyper in layer.hyper.items():
                weights = hyper.read(streams_TND, views.residual_TD)
                normed_TD = self._read_residual(layer, f"before_{half}", views, has_delta=False)
                if half == "mixer":
                    self._run_mixers(layer, step, views, normed_TD)
                else:
                    self._run_mlp(cast(FeedForwardLayer, layer.mlp), step, views, normed_TD, views.delta_TD)
                hyper.write(streams_TND, weights, views.delta_TD)
        head.read(streams_TND, views.residual_TD)
        return views.residual_TD

    def _end_layer(self, end: LayerEnd, views: TokenViews, has_delta: bool) -> bool:
        """What follows a layer's halves, on the residual with all that has joined it."""
        if has_delta:
            ops.add(views.delta_TD, views.residual_TD, self.spec.residual_scale)
        end.run(views, None if self._inputs is None else self.workspace.inputs(len(views.residual_TD)))
        return False

    def _run_parallel(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, has_delta: bool) -> bool:
        """Both halves on the same residual; their outputs are added."""
        normed = self._read_residual(layer, "before_mixer", views, has_delta)
        self._run_mixers(layer, step, views, normed)
        if "before_mlp" in layer.norms:
            self._apply_norm(self.spec.norm, layer.norms["before_mlp"], views.residual_TD, views.normed_TD, None)
        mlp = cast(FeedForwardLayer, layer.mlp)
        out_TD = views.normed_TD if mlp.mixture is None else views.beside_TD  # experts do not write where they read
        self._run_mlp(mlp, step, views, normed, out_TD)
        ops.add(out_TD, views.delta_TD)
        return True

    def _read_residual(self, layer: DecoderLayer, place: str, views: TokenViews, has_delta: bool) -> torch.Tensor:
        """Add the last half's output to the residual, and give what the next half reads."""
        weight, scale = layer.norms.get(place), self.spec.residual_scale
        on_residual = layer.placement.on_residual
        if has_delta and (weight is None or on_residual or scale != 1.0):
            ops.add(views.delta_TD, views.residual_TD, scale)
            has_delta = False
        if weight is not None and on_residual:
            self._apply_norm(self.spec.norm, weight, views.residual_TD, views.residual_TD, None)
        if weight is None or on_residual:
            return views.residual_TD
        if has_delta:
            self._apply_norm(self.spec.norm, weight, views.delta_TD, views.normed_TD, views.residual_TD)
        else:
            self._apply_norm(self.spec.norm, weight, views.residual_TD, views.normed_TD, None)
        return views.normed_TD

    def _norm_output(self, layer: DecoderLayer, place: str, views: TokenViews) -> bool:
        """Returns whether the delta is still to be added to the residual."""
        weight, joint, on_residual = layer.norms.get(place), layer.joints.get(place), layer.placement.on_residual
        if weight is not None and not on_residual:
            self._apply_norm(self.spec.norm, weight, views.delta_TD, views.delta_TD, None)
        if joint is not None:
            for values_TD, scale in ((views.residual_TD, joint.keep), (views.delta_TD, joint.join)):
                if scale != 1.0:
                    ops.scale_and_cap(values_TD, scale, 0.0)
        if weight is None or not on_residual:
            return True
        ops.add(views.delta_TD, views.residual_TD, self.spec.residual_scale)
        self._apply_norm(self.spec.norm, weight, views.residual_TD, views.residual_TD, None)
        return False

    def _run_mixers(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, x_TD: torch.Tensor) -> None:
        """Their sum over mixers and ranks, in the delta."""
        first, *others = layer.mixers
        first.run(x_TD, views.delta_TD, step, views)
        for mixer in others:
            mixer.run(x_TD, views.beside_TD, step, views)
            ops.add(views.beside_TD, views.delta_TD)
        self.communicator.all_reduce(views.delta_TD)

    def _run_mlp(
        self, mlp: FeedForwardLayer, step: StepInputs, views: TokenViews, x_TD: torch.Tensor, out_TD: torch.Tensor
    ) -> None:
        mlp.run(x_TD, out_TD, step, views)
        if mlp in self._takes_late:
            ops.add(views.beside_TD, out_TD)
        if not mlp.is_whole:
            self.communicator.all_reduce(out_TD)

    def _apply_norm(
        self, norm: Norm, weight: NormWeight, x_TD: torch.Tensor, out_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> None:
        if isinstance(norm, LayerNorm):
            ops.layer_norm(x_TD, weight.weight, weight.bias, norm.eps, out_TD, residual_TD)
        else:
            ops.rms_norm(x_TD, weight.weight, norm.eps, out_TD, residual_TD)

    # Construction.

    def _build_layers(self, max_tokens: int, activation_dtype: torch.dtype) -> list[DecoderLayer]:
        context = LayerContext(
            hidden=self.spec.hidden,
            dtype=self.dtype,
            activation_dtype=activation_dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            max_tokens=max_tokens,
            max_positions=self.max_positions,
            device=self.device,
            plan=self.plan,
            communicator=self.communicator,
            linear_method=self.linear_method,
            backend=self.attention_backend,
            deterministic=self.deterministic,
        )
        has_end = self.spec.layer_scale or self.spec.layer_input is not None
        layers = [
            DecoderLayer(
                [kind_of(mixer)(mixer, context) for mixer in self.spec.mixers_of(layer)],
                None if mlp is None else FeedForwardLayer(mlp, context),
                placement,
                self.spec.joints_of(layer),
                LayerEnd(layer, self.spec.layer_input, self.linear_method) if has_end else None,
            )
            for layer, (mlp, placement) in enumerate(zip(self.spec.mlps(), self.spec.placements(), strict=True))
        ]
        hyper = self.spec.hyper
        for layer in layers if hyper is not None else ():
            layer.hyper = {half: HyperConnection(cast(HyperConnections, hyper)) for half in ("mixer", "mlp")}
        for mixer in (mixer for layer in layers for mixer in layer.mixers):
            mixer.see_layers([layer.mixers for layer in layers])
        return layers

    def _give_weightless_norms(self) -> None:
        """Where the checkpoint's norms have no weights: ones."""
        ones = NormWeight(torch.ones(self.spec.hidden, device=self.device))
        if self.spec.embedding_norm is not None and not self.spec.embedding_norm.weight:
            self._embedding_norm = ones
        if self.spec.norm.weight:
            return
        self._final_norm = ones if self.spec.final_norm else None
        for index, layer in enumerate(self._layers):
            layer.norms = dict.fromkeys(norm_places(self.spec, index), ones)

    def _can_fuse(self) -> bool:
        """Plain pre-norm layers, where the platform has kernels that do more than one thing."""
        spec = self.spec
        if spec.layer_scale or spec.layer_input is not None or spec.hyper is not None:
            return False
        plain = all(placement == PRE for placement in spec.placements())
        plain = plain and isinstance(spec.norm, RMSNorm) and spec.residual_scale == 1.0
        mixtures = [mlp for mlp in spec.mlps() if isinstance(mlp, MoE)]
        if any(mlp.latent or mlp.late or mlp.out_bias or mlp.routing.cap for mlp in mixtures):
            return False
        if mixtures and not ops.is_native("norm_moe"):
            return False
        if any(
            isinstance(mlp, GatedMLP) and (mlp.scale, mlp.out_scale, mlp.limit) != (1.0, 1.0, 0.0)
            for mlp in spec.mlps()
        ):
            return False
        if any(len(layer.mixers) > 1 or not all(mixer.can_fuse for mixer in layer.mixers) for layer in self._layers):
            return False
        return plain and ops.is_native("norm_linear")

    def _narrows(self) -> bool:
        """Whether the last layer can leave out the tokens that need no logits."""
        mixers = self._layers[-1].mixers if self._layers else []
        is_plain = len(mixers) == 1 and self.spec.layer_input is None and self.spec.hyper is None
        return is_plain and mixers[0].can_narrow and not self._layers[-1].placement.parallel

    def _build_workspace(self, max_tokens: int, max_logits: int, dtype: torch.dtype) -> Workspace:
        mlps = [layer.mlp for layer in self._layers if layer.mlp is not None]
        halves, ends = [*self._mixers(), *mlps], [layer.end for layer in self._layers if layer.end is not None]
        narrow = max(part.narrow for part in (*halves, *ends))
        self.linear_method.reserve(max_tokens, max(narrow, self.spec.hidden), self.device)
        return Workspace(
            max_tokens=max_tokens,
            max_logits=max_logits,
            hidden=self.spec.hidden,
            wide=max(half.wide for half in halves),
            narrow=narrow,
            projected=self.spec.embedding_width,
            streams=0 if self.spec.hyper is None else self.spec.hyper.streams,
            inputs=0 if self._inputs is None else self.spec.layers * self._inputs.input.width,
            sampled=self._layers[-1].mixers[0].wide if self._can_narrow else 0,
            has_beside=any(len(layer.mixers) > 1 or layer.placement.parallel for layer in self._layers)
            or any(mlp.is_whole or mlp.is_late for mlp in mlps),
            vocab=self.spec.vocab,
            ranks=self.plan.size,
            dtype=dtype,
            device=self.device,
        )

    def describe(self) -> dict[str, Any]:
        """Numbers for `quire explain`: parameters, bytes, pages, layers."""
        return {
            **describe_weights(self.modules, self.plan, self.dtype, self.linear_method, self.spec),
            **describe_pages(self.kv_cache_specs()),
            "workspace_bytes": self.workspace.num_bytes + self.linear_method.scratch_bytes,
            "layers": self.spec.layers,
            "hidden": self.spec.hidden,
            "vocab": self.spec.vocab,
            "max_positions": self.max_positions,
        }


def attention_requests(
    spec: DecoderSpec,
    kv_dtype: torch.dtype,
    block_size: int,
    plan: ParallelPlan | None = None,
    deterministic: bool = False,
) -> list[AttentionRequest]:
    """What the layers of a spec need of an attention backend on one rank, each kind of layer once."""
    plan = plan or ParallelPlan()
    mixers = dict.fromkeys(mixer for layer in range(spec.layers) for mixer in spec.mixers_of(layer))
    return [
        request
        for mixer in mixers
        for request in kind_of(mixer).attention_requests(mixer, kv_dtype, block_size, plan, deterministic)
    ]


def _check_positions(spec: DecoderSpec, max_positions: int | None) -> int:
    learned = spec.learned_positions
    wanted = max_positions or spec.max_positions
    if learned is not None and wanted > learned.count:
        raise ConfigError(
            f"max_model_len={wanted}, but the model has a table of only {learned.count} positions",
            setting="max_model_len",
        )
    return wanted
