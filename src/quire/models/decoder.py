"""The one module that runs any `DecoderSpec`.

Knows the order of a layer's operations and which buffers they use; every arithmetic operation is a kernel, every matrix
belongs to a `LinearMethod`, and pages belong to the attention backend. Knows nothing of devices, requests or files.

Legend: T tokens of the step, S positions that need logits, D hidden, V vocabulary, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, cast

import torch

from quire.attention.interface import AttentionBackend, AttentionParams, AttentionRequest
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.distributed.communicator import Communicator, SingleRank
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.ops import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.layers.moe import Mixture
from quire.layers.parallel import ParallelPlan
from quire.models import weights as weight_table
from quire.models.assembly import Assembler, NormWeight, Sliceable, Weight
from quire.models.describe import describe_pages, describe_weights
from quire.models.interface import CausalLM, StepInputs
from quire.models.modules import modules_of
from quire.models.rope import Rope
from quire.models.spec import PRE, Attention, DecoderSpec, FeedForward, GatedMLP, LayerNorm, MoE, Norm, RMSNorm
from quire.models.workspace import TokenViews, Workspace


@dataclasses.dataclass
class DecoderLayer:
    """One layer: its spec on this rank, its weights by name, and what attention needs."""

    mixer: Attention
    mlp: FeedForward
    params: AttentionParams
    rope: ops.Rope | None
    activation: str
    norms: dict[str, NormWeight] = dataclasses.field(default_factory=dict)
    linears: dict[str, LinearWeight] = dataclasses.field(default_factory=dict)
    mixture: Mixture | None = None
    kv_cache: torch.Tensor | None = None
    group: int = 0


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
        self._lm_head: LinearWeight | None = None
        self._tied_head: LinearWeight | None = None
        self._final_norm: NormWeight | None = None
        self._layers = self._build_layers()
        self._is_fused = self._can_fuse()
        self.workspace = self._build_workspace(max_tokens, max_logits, activation_dtype or dtype)
        self._build_mixtures()

    def stored_dtype(self, source: weight_table.Source) -> torch.dtype:
        """The type in which the checkpoint must hold a tensor; for plain types, any of them will do."""
        if not source.module.is_quantizable or source.suffix == "bias":
            return self.dtype
        return self.linear_method.of_module(source.module.sources).stored_dtype(source.suffix, self.dtype)

    # What the layers need of others.

    def attention_requests(self) -> list[AttentionRequest]:
        """What each layer needs of an attention backend."""
        return attention_requests(self.spec, self.kv_dtype, self.block_size, self.plan, self.deterministic)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [
            KVCacheSpec(
                kind=KVKind.SLIDING_WINDOW if layer.mixer.window > 0 else KVKind.FULL,
                block_size=self.block_size,
                bytes_per_token=2 * layer.params.num_kv_heads * layer.params.head_dim * self.kv_dtype.itemsize,
                num_kv_heads=layer.params.num_kv_heads,
                head_dim=layer.params.head_dim,
                dtype=str(self.kv_dtype).removeprefix("torch."),
                window=layer.mixer.window,
            )
            for layer in self._layers
        ]

    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        for layer, kv_cache, group in zip(self._layers, kv_caches, group_of_layer, strict=True):
            layer.kv_cache, layer.group = kv_cache, group

    # Weights.

    def follow_names(self, names: Collection[str]) -> None:
        """Expect the experts as a checkpoint with these names has them: each by itself, or all in one tensor."""
        self.modules = weight_table.with_layout_of(self.modules, self.spec, names)
        self.sources = weight_table.sources_of(self.modules, self.spec, self.plan, self.linear_method)

    def load_weights(self, weights: Iterable[tuple[str, Sliceable]]) -> None:
        """One streaming pass. A rank slices what it is given, so that something lazily read from a file is read in part.

        Raises:
            ConfigError: names are missing or unknown; lists both.
        """
        assembler = Assembler(self.sources, self.plan, self.dtype, self.device, self.linear_method)
        unexpected: list[str] = []
        seen: list[str] = []
        for name, tensor in weights:
            canonical = weight_table.canonical_name(name, self.sources, self.spec)
            if canonical in self.sources:
                seen.append(canonical)
                finished = assembler.add(canonical, tensor)
                if finished is not None:
                    self._set_weight(finished[0].name, finished[1])
            elif not weight_table.is_ignored(name, self.spec):
                unexpected.append(name)
        if unexpected or assembler.missing():
            weight_table.check_names(self.sources, self.spec, seen + unexpected)

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module.startswith("layers."):
            _, index, name = module.split(".")
            layer = self._layers[int(index)]
            if layer.mixture is not None and name in layer.mixture.WEIGHTS:
                layer.mixture.set_weight(name, cast("LinearWeight | torch.Tensor", weight))
            elif isinstance(weight, NormWeight):
                layer.norms[name] = weight
            elif isinstance(weight, LinearWeight):
                layer.linears[name] = weight
            else:
                layer.params = dataclasses.replace(layer.params, **{name: weight})
        else:
            setattr(self, f"_{module}", weight)

    # One step.

    def forward(self, step: StepInputs) -> torch.Tensor:
        count, spec = step.num_tokens, self.spec
        views = self.workspace.tokens(count)
        ops.embedding(
            step.input_ids[:count], cast(LinearWeight, self._embedding), views.residual_TD, self._embedding_scale
        )
        if self._positions is not None:
            ops.add_embedding(step.positions[:count], self._positions, views.residual_TD)
        if self._is_fused:
            for layer in self._layers:
                self._run_fused(layer, step, views)
            return views.residual_TD
        run_layer = self._run_parallel if spec.placement.parallel else self._run_sequential
        has_delta = False
        for layer in self._layers:
            run_layer(layer, step, views, has_delta)
            has_delta = True
        if has_delta:
            ops.add(views.delta_TD, views.residual_TD, spec.residual_scale)
        return views.residual_TD

    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        spec = self.spec
        residual_TD = self.workspace.tokens(step.num_tokens).residual_TD
        gathered_SD, logits_SV = self.workspace.logits(step.num_logits)
        ops.gather_rows(residual_TD, step.logits_index[: step.num_logits], gathered_SD)
        if self._final_norm is not None:
            self._apply_norm(spec.norm, self._final_norm, gathered_SD, gathered_SD, None)
        self._apply_head(gathered_SD, logits_SV)
        if spec.logits_scale != 1.0 or spec.logits_soft_cap > 0:
            ops.scale_and_cap(logits_SV, spec.logits_scale, spec.logits_soft_cap)
        return logits_SV

    def _apply_head(self, gathered_SD: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """All logits on every rank: each computes those of its tokens, if its head is a part of the whole."""
        head = self._head()
        if head.out_features == self.spec.vocab:
            ops.linear(gathered_SD, head, logits_SV)
            return
        shares_RSW = self.workspace.shares(len(logits_SV), self.plan.size)
        mine_SW = shares_RSW[self.plan.rank]
        if head.out_features < mine_SW.shape[1]:  # the last rank has fewer tokens, the gather's rows are of one length
            narrow_SW = self.workspace.narrow_share(len(logits_SV), head.out_features)
            ops.linear(gathered_SD, head, narrow_SW)
            mine_SW[:, : head.out_features].copy_(narrow_SW)
        else:
            ops.linear(gathered_SD, head, mine_SW)
        self.communicator.all_gather(mine_SW, shares_RSW)
        for rank, share_SW in enumerate(shares_RSW):
            tokens = ParallelPlan(self.plan.size, rank).vocabulary(self.spec.vocab)
            logits_SV[:, tokens].copy_(share_SW[:, : tokens.stop - tokens.start])

    def _head(self) -> LinearWeight:
        """The matrix of logits: this rank's rows of it where it has no more, or where they can be had without a copy."""
        if not self.spec.tied_embeddings:
            return cast(LinearWeight, self._lm_head)
        if self._tied_head is None:
            whole = self._tied_head = cast(LinearWeight, self._embedding)
            if self.plan.size > 1 and whole.data is not None:
                rows = self.plan.vocabulary(self.spec.vocab)
                self._tied_head = LinearWeight(rows.stop - rows.start, whole.in_features, whole.dtype, whole.data[rows])
        return self._tied_head

    def _run_fused(self, layer: DecoderLayer, step: StepInputs, views: TokenViews) -> None:
        """As `_run_sequential` for plain pre-norm layers: norms, activations and residuals are the matrices' own business.

        Over several ranks the residual itself is summed: rank 0 adds its part to it, the others put theirs in its place."""
        method, linears, eps = self.linear_method, layer.linears, cast(RMSNorm, self.spec.norm).eps
        residual_TD, normed_TD, delta_TD = views.residual_TD, views.normed_TD, views.delta_TD
        params = layer.params
        qkv_TC = views.wide((params.num_heads + 2 * params.num_kv_heads) * params.head_dim)
        attended_TNH = views.narrow(params.num_heads * params.head_dim)
        method.apply_normed(residual_TD, layer.norms["before_mixer"].weight, eps, linears["qkv"], qkv_TC, normed_TD)
        self._attend(layer, step, qkv_TC, attended_TNH)
        self._add_to_residual(attended_TNH, linears["out"], views)
        norm_D, width = layer.norms["before_mlp"].weight, layer.mlp.intermediate // self.plan.size
        is_first = self.plan.rank == 0
        if layer.mixture is not None:
            if is_first:
                layer.mixture.run_normed(residual_TD, norm_D, eps, step.attention[0].shape, views)
            else:
                ops.rms_norm(residual_TD, norm_D, eps, normed_TD)
                layer.mixture.run(normed_TD, residual_TD, step.attention[0].shape, views)
            self.communicator.all_reduce(residual_TD)
            return
        activated_TI = views.narrow(width)
        if isinstance(layer.mlp, GatedMLP) and is_first:
            method.apply_gated_mlp(
                residual_TD, norm_D, eps, linears["gate_up"], layer.activation, linears["down"], activated_TI, normed_TD,
                views.wide(2 * width), delta_TD,
            )  # fmt: skip
            self.communicator.all_reduce(residual_TD)
            return
        if isinstance(layer.mlp, GatedMLP):
            method.apply_normed_gated(
                residual_TD, norm_D, eps, linears["gate_up"], layer.activation, activated_TI, normed_TD,
                views.wide(2 * width),
            )  # fmt: skip
        else:
            method.apply_normed(residual_TD, norm_D, eps, linears["up"], activated_TI, normed_TD)
            ops.activation(activated_TI, layer.activation)
        self._add_to_residual(activated_TI, linears["down"], views)

    def _add_to_residual(self, x_TK: torch.Tensor, weight: LinearWeight, views: TokenViews) -> None:
        """residual += x @ weight.T of all ranks together."""
        if self.plan.rank == 0:
            self.linear_method.apply_add(x_TK, weight, views.residual_TD, views.delta_TD)
        else:
            self.linear_method.apply(x_TK, weight, views.residual_TD)
        self.communicator.all_reduce(views.residual_TD)

    def _run_sequential(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, has_delta: bool) -> None:
        """The mixer, then the feed-forward on a residual that has seen the mixer's output."""
        normed = self._read_residual(layer, "before_mixer", views, has_delta)
        self._run_mixer(layer, step, views, normed)
        self._norm_output(layer, "after_mixer", views)
        normed = self._read_residual(layer, "before_mlp", views, True)
        self._run_mlp(layer, step, views, normed, views.delta_TD)
        self._norm_output(layer, "after_mlp", views)

    def _run_parallel(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, has_delta: bool) -> None:
        """Both halves on the same residual; their outputs are added."""
        normed = self._read_residual(layer, "before_mixer", views, has_delta)
        self._run_mixer(layer, step, views, normed)
        if "before_mlp" in layer.norms:
            self._apply_norm(self.spec.norm, layer.norms["before_mlp"], views.residual_TD, views.normed_TD, None)
        self._run_mlp(layer, step, views, normed, views.normed_TD)
        ops.add(views.normed_TD, views.delta_TD)

    def _read_residual(self, layer: DecoderLayer, place: str, views: TokenViews, has_delta: bool) -> torch.Tensor:
        """Add the last half's output to the residual, and give what the next half reads."""
        weight, scale = layer.norms.get(place), self.spec.residual_scale
        if has_delta and (weight is None or scale != 1.0):
            ops.add(views.delta_TD, views.residual_TD, scale)
            has_delta = False
        if weight is None:
            return views.residual_TD
        if has_delta:
            self._apply_norm(self.spec.norm, weight, views.delta_TD, views.normed_TD, views.residual_TD)
        else:
            self._apply_norm(self.spec.norm, weight, views.residual_TD, views.normed_TD, None)
        return views.normed_TD

    def _norm_output(self, layer: DecoderLayer, place: str, views: TokenViews) -> None:
        weight = layer.norms.get(place)
        if weight is not None:
            self._apply_norm(self.spec.norm, weight, views.delta_TD, views.delta_TD, None)

    def _run_mixer(self, layer: DecoderLayer, step: StepInputs, views: TokenViews, x_TD: torch.Tensor) -> None:
        params, linears = layer.params, layer.linears
        qkv_TC = views.wide((params.num_heads + 2 * params.num_kv_heads) * params.head_dim)
        attended_TNH = views.narrow(params.num_heads * params.head_dim)
        self.linear_method.apply(x_TD, linears["qkv"], qkv_TC)
        self._attend(layer, step, qkv_TC, attended_TNH)
        self.linear_method.apply(attended_TNH, linears["out"], views.delta_TD)
        self.communicator.all_reduce(views.delta_TD)

    def _attend(self, layer: DecoderLayer, step: StepInputs, qkv_TC: torch.Tensor, out_TNH: torch.Tensor) -> None:
        """Norms of heads, rotation, pages and attention: the backend's business."""
        metadata, kv_cache = step.attention[layer.group], cast(torch.Tensor, layer.kv_cache)
        norm = layer.mixer.qk_norm
        if norm is None:
            self.attention_backend.attend(qkv_TC, kv_cache, metadata, layer.params, out_TNH, layer.rope)
        else:
            q_norm, k_norm = layer.norms["q_norm"].weight, layer.norms["k_norm"].weight
            self.attention_backend.attend(
                qkv_TC, kv_cache, metadata, layer.params, out_TNH, layer.rope, q_norm, k_norm, norm.eps
            )

    def _run_mlp(
        self, layer: DecoderLayer, step: StepInputs, views: TokenViews, x_TD: torch.Tensor, out_TD: torch.Tensor
    ) -> None:
        if layer.mixture is not None:
            layer.mixture.run(x_TD, out_TD, step.attention[0].shape, views)
            self.communicator.all_reduce(out_TD)
            return
        width = layer.mlp.intermediate // self.plan.size
        activated_TI = views.narrow(width)
        if isinstance(layer.mlp, GatedMLP):
            gate_up = views.wide(2 * width)
            self.linear_method.apply(x_TD, layer.linears["gate_up"], gate_up)
            ops.gated_activation(gate_up, layer.activation, activated_TI)
        else:
            self.linear_method.apply(x_TD, layer.linears["up"], activated_TI)
            ops.activation(activated_TI, layer.activation)
        self.linear_method.apply(activated_TI, layer.linears["down"], out_TD)
        self.communicator.all_reduce(out_TD)

    def _apply_norm(
        self, norm: Norm, weight: NormWeight, x_TD: torch.Tensor, out_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> None:
        if isinstance(norm, LayerNorm):
            ops.layer_norm(x_TD, weight.weight, weight.bias, norm.eps, out_TD, residual_TD)
        else:
            ops.rms_norm(x_TD, weight.weight, norm.eps, out_TD, residual_TD)

    # Construction.

    def _build_layers(self) -> list[DecoderLayer]:
        tables: dict[Rope, ops.Rope] = {}
        layers: list[DecoderLayer] = []
        requests = self.attention_requests()
        for mixer, mlp, request in zip(self.spec.mixers(), self.spec.mlps(), requests, strict=True):
            if mixer.rope is not None and mixer.rope not in tables:
                cos_sin = mixer.rope.table(self.max_positions).to(self.device)
                tables[mixer.rope] = ops.Rope(cos_sin, mixer.rope.rotary_dim, mixer.rope.interleaved)
            params = AttentionParams(
                num_heads=request.num_heads,
                num_kv_heads=request.num_kv_heads,
                head_dim=mixer.head_dim,
                scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
                window=mixer.window,
                soft_cap=mixer.soft_cap,
                deterministic=self.deterministic,
            )
            rope = None if mixer.rope is None else tables[mixer.rope]
            layers.append(DecoderLayer(mixer, mlp, params, rope, kernel_activation(mlp.act)))
        return layers

    def _can_fuse(self) -> bool:
        """Plain pre-norm layers, where the platform has kernels that do more than one thing."""
        spec = self.spec
        plain = spec.placement == PRE and isinstance(spec.norm, RMSNorm) and spec.residual_scale == 1.0
        if any(isinstance(mlp, MoE) for mlp in spec.mlps()) and not ops.is_native("norm_moe"):
            return False
        return plain and ops.is_native("norm_linear")

    def _build_workspace(self, max_tokens: int, max_logits: int, dtype: torch.dtype) -> Workspace:
        wide = narrow = 0
        for layer in self._layers:
            mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
            params, width = layer.params, 0 if mlp is None else mlp.intermediate // self.plan.size
            qkv = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim
            wide = max(wide, qkv, 2 * width if isinstance(mlp, GatedMLP) else 0)
            narrow = max(narrow, params.num_heads * params.head_dim, width)
        self.linear_method.reserve(max_tokens, max(narrow, self.spec.hidden), self.device)
        return Workspace(
            max_tokens=max_tokens,
            max_logits=max_logits,
            hidden=self.spec.hidden,
            wide=wide,
            narrow=narrow,
            vocab=self.spec.vocab,
            ranks=self.plan.size,
            dtype=dtype,
            device=self.device,
        )

    def _build_mixtures(self) -> None:
        """The mixtures of the layers that have one; those of equal shape share a scratch."""
        for layer in self._layers:
            mlp = layer.mlp
            if isinstance(mlp, MoE):
                shared = 0 if mlp.shared is None else mlp.shared.intermediate // self.plan.size
                scratch = self.workspace.experts(mlp.routing, mlp.intermediate // self.plan.size)
                layer.mixture = Mixture(mlp.routing, layer.activation, shared, self.linear_method, scratch)

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
    """What each layer of a spec needs of an attention backend on one rank."""
    plan = plan or ParallelPlan()
    requests: list[AttentionRequest] = []
    for mixer in spec.mixers():
        heads, kv_heads = plan.groups(mixer.heads, "heads"), plan.groups(mixer.kv_heads, "KV heads")
        requests.append(
            AttentionRequest(
                num_heads=heads.stop - heads.start,
                num_kv_heads=kv_heads.stop - kv_heads.start,
                head_dim=mixer.head_dim,
                kv_dtype=kv_dtype,
                block_size=block_size,
                window=mixer.window,
                soft_cap=mixer.soft_cap,
                has_sinks=mixer.sinks,
                deterministic=deterministic,
            )
        )
    return requests


def _check_positions(spec: DecoderSpec, max_positions: int | None) -> int:
    learned = spec.learned_positions
    wanted = max_positions or spec.max_positions
    if learned is not None and wanted > learned.count:
        raise ConfigError(
            f"max_model_len={wanted}, but the model has a table of only {learned.count} positions",
            setting="max_model_len",
        )
    return wanted
