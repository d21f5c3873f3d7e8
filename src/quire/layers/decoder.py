"""The one module that runs any `DecoderSpec`.

Knows how a step begins and ends, and which weights and buffers there are; what layers do is a list (`operations.py`). Every
arithmetic operation is a kernel, every matrix belongs to a `LinearMethod`, and pages belong to the attention backend. Knows
nothing of devices, requests or files.

Legend: T tokens of the step, S positions that need logits, D hidden, V vocabulary.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from quire.attention.interface import AttentionRequest
from quire.config.kv_spec import KVCacheSpec
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers import stages
from quire.layers import weights as weight_table
from quire.layers.assembly import Assembler, NormWeight, Sliceable, Weight
from quire.layers.decoder_layer import BOUNDS, DecoderLayer, modules_of
from quire.layers.describe import describe_pages, describe_weights
from quire.layers.half import HalfInput, SampledViews
from quire.layers.held_weights import apply_norm
from quire.layers.interface import CausalLM, LayerContext, ModelContext, PatchInputs, StepInputs
from quire.layers.mixers import MixerLayer, kind_of
from quire.layers.mixers.attention import AxisTable
from quire.layers.modules import Module
from quire.layers.moe import Mixture
from quire.layers.operations import OperationList, SampledOperation, can_fuse
from quire.layers.parallel import ParallelPlan
from quire.layers.residual_extras import HyperConnection, LayerInputs
from quire.layers.workspace import TokenViews, Workspace
from quire.models.rope import Rope, Sinusoids
from quire.models.sight import Patches
from quire.models.spec import DecoderSpec


class Decoder(CausalLM):
    """A model made from a spec."""

    _first_input: HalfInput | None = None

    def __init__(self, spec: DecoderSpec, context: ModelContext) -> None:
        self.stage, self._mine = context.stage, context.stage.layers(spec.layers, spec.weights.sublayers)
        self.modules, elsewhere = stages.part(modules_of(spec), spec, self.stage, self._mine)
        spec = spec if not elsewhere else stages.ignoring(spec, elsewhere)
        self.spec, self.context, self.plan, self.communicator = spec, context, context.plan, context.communicator
        self.dtype, self.kv_dtype, self.device = context.dtype, context.kv_dtype, context.device
        self.block_size = context.block_size
        self.attention_backend, self.linear_method = context.backend, context.linear_method
        self.max_positions = _check_positions(spec, context.max_positions)
        self.sources = weight_table.sources_of(self.modules, spec, self.plan, self.linear_method)
        # Checkpoints were trained with the factor in their own number type (Gemma's square root is not exact in bfloat16).
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=context.dtype))
        eps = spec.norm.eps if spec.final_eps is None else spec.final_eps
        self._last_norm = dataclasses.replace(spec.norm, eps=eps)
        self._weights: dict[str, Any] = {}
        if isinstance(spec.learned_positions, Sinusoids):
            table = spec.learned_positions.table(spec.hidden)
            self._weights["positions"] = ops.pack_linear(table.to(context.device, context.dtype))
        self._linears: dict[str, LinearWeight] = {}
        self._hyper_head = None if spec.hyper is None else HyperConnection(spec.hyper)
        self._inputs = None if spec.layer_input is None else LayerInputs(spec, self.dtype, self.linear_method)
        shared: dict[str, Any] = vars(context) | {"max_positions": self.max_positions}
        layer_context = LayerContext(**shared, hidden=spec.hidden)
        self._layers = [DecoderLayer(spec, layer, layer_context) for layer in self._mine]
        seen = dict(zip(self._mine, (layer.mixers for layer in self._layers), strict=True))
        if elsewhere and (spec.vision is not None or spec.hearing is not None):
            raise stages.cannot_part("pictures and sounds are read beside the first layers")
        if elsewhere and not all(mixer.can_stage for mixer in self._mixers()):
            raise stages.cannot_part("layers read what other layers own")
        for mixer in self._mixers():
            mixer.see_layers(stages.SeenLayers(seen))
        self._axis_tables = [
            AxisTable(rope, table, self.max_positions)
            for rope, table in layer_context.tables.items()
            if isinstance(rope, Rope) and rope.axes
        ]
        self.num_axes = max((table.num_axes for table in self._axis_tables), default=0)
        self._give_weightless_norms()
        mlps = [layer.mlp for layer in self._layers if layer.mlp is not None]
        self.can_replay = all(half.can_replay for half in (*self._mixers(), *mlps))
        self.workspace = self._build_workspace()
        for layer in self._layers:
            if layer.mlp is not None:
                layer.mlp.reserve(self.workspace)
        self._layer_context = layer_context
        self._handed: dict[int, torch.Tensor] = {}
        self._operations = self._list_operations(layer_context)

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

    def parts(self) -> Iterator[object]:
        yield from (self.attention_backend, self.linear_method, *self._mixers(), *self.mixtures())

    def mixtures(self) -> Iterator[Mixture]:
        """Those of all layers, in order."""
        feed_forwards = (layer.mlp for layer in self._layers)
        return (mlp.mixture for mlp in feed_forwards if mlp is not None and mlp.mixture is not None)

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
        assembler, seen = self.assembler(), list[str]()
        for name, tensor in weights:
            seen.append(name)
            yield from self.put(assembler, name, tensor)
        weight_table.check_names(self.sources, self.spec, seen)

    def assembler(self) -> Assembler:
        """Puts a checkpoint's tensors together, as `put` hands them over."""
        return Assembler(self.sources, self.plan, self.dtype, self.device, self.linear_method)

    def put(self, assembler: Assembler, name: str, tensor: Sliceable) -> Iterator[tuple[str, Weight]]:
        """(module, weight) that a tensor of the checkpoint finishes. One that the model has no place for is passed over."""
        canonical = weight_table.canonical_name(name, self.sources, self.spec)
        if canonical in self.sources:
            finished = assembler.add(canonical, tensor)
            if finished is not None:
                yield finished[0].name, finished[1]
        for module in weight_table.cache_scales(name, self.spec):
            yield module, tensor[()]

    def _set_weight(self, module: str, weight: Weight) -> None:
        if isinstance(weight, LinearWeight):
            weight.name = module
            self._linears[module] = weight
        if module.endswith(BOUNDS):
            self._bound(module.removesuffix(BOUNDS), cast(torch.Tensor, weight))
        elif module.startswith("layers."):
            _, index, name = module.split(".")
            self._layers[int(index) - self._mine.start].set_weight(name, weight)
        elif self._hyper_head is not None and module.startswith("hyper_head"):
            self._hyper_head.set_weight(module, weight)
        elif self._inputs is not None and module.startswith("input_"):
            self._inputs.set_weight(module, weight)
        else:
            self._weights[module] = weight
            if self.spec.tied_embeddings:
                self._weights.pop("lm_head", None)  # made of the embedding

    def _bound(self, name: str, bounds_P4: torch.Tensor) -> None:
        (parts,) = (module.parts for module in self.modules if module.name == name)
        self.linear_method.bound(name, bounds_P4, [part.rows for part in parts])

    # One step.

    def begin_step(self, step: StepInputs) -> None:
        for table in self._axis_tables:
            table.fill(step)

    def forward(self, step: StepInputs) -> torch.Tensor:
        views = self.workspace.tokens(step.num_tokens)
        self._operations.tapped.clear()
        self.linear_method.see_rows(are_samples=False)
        if self.stage.is_first:
            self._embed(step, views)
        sampled_mixer = self._operations.sampled_mixer
        if step.sampled is not None and sampled_mixer is not None:
            return self._run_for_sampled(step, views, step.sampled, *sampled_mixer)
        for operation in self._operations.listed:
            operation(step, views)
        return views.residual_TD

    def payload(self, num_tokens: int) -> dict[str, torch.Tensor]:
        spec, workspace = self.spec, self.workspace
        handed = {"residual": workspace.tokens(num_tokens).residual_TD}
        if spec.hyper is not None:
            handed["streams"] = workspace.streams[:num_tokens]
        if spec.layer_input is not None:
            handed["inputs"] = workspace.inputs[:num_tokens]
        return handed

    def _run_for_sampled(
        self, step: StepInputs, views: TokenViews, sampled: StepInputs, place: int, run_mixer: SampledOperation
    ) -> torch.Tensor:
        """Run the list, but from the last mixer on, at `place`, only for tokens that need logits: their residual [S, D]."""
        few = self.workspace.samples(step.num_logits)
        for operation in self._operations.listed[:place]:
            operation(step, views)
        rows = self.workspace.sampled(step.num_logits, self._layers[-1].mixers[0].wide)
        run_mixer(step, views, SampledViews(few, rows, step.logits_index[: step.num_logits]))
        if step.num_logits:
            for operation in self._operations.listed[place + 1 :]:
                operation(sampled, few)
        return few.residual_TD

    @property
    def tapped(self) -> list[torch.Tensor]:
        """The residual behind each of the spec's `taps`, in that order, as `forward` left it."""
        in_order = sorted(self.spec.taps)
        return [self._operations.tapped[in_order.index(layer)] for layer in self.spec.taps]

    def hand_out(self, layers: Sequence[int], *, is_normed: bool = True) -> list[torch.Tensor]:
        """From now on each step leaves copies [max_T, D] of the residual before these layers; before the one behind the last, of
        the hidden states behind the last norm (or of the residual there, too)."""
        context, self._hands_normed = self._layer_context, is_normed and self.spec.final_norm
        shape, dtype = (context.max_tokens, self.spec.hidden), context.activation_dtype
        self._handed = {layer: torch.zeros(shape, dtype=dtype, device=self.device) for layer in layers}
        self._count_up = torch.arange(context.max_tokens, dtype=torch.int32, device=self.device)
        self._operations = self._list_operations(context)
        return [self._handed[layer] for layer in layers]

    def compute_hidden(self, step: StepInputs) -> torch.Tensor:
        views = self.workspace.tokens(step.num_tokens)
        if not self.spec.final_norm:
            return views.residual_TD
        apply_norm(self._last_norm, self._weights["final_norm"], views.residual_TD, views.normed_TD)
        return views.normed_TD

    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        spec = self.spec
        self.linear_method.see_rows(are_samples=True)
        logits_SV = self.workspace.logits[: step.num_logits]
        gathered_SD = self.workspace.samples(step.num_logits).residual_TD
        if step.sampled is None or self._operations.sampled_mixer is None:
            residual_TD = self.workspace.tokens(step.num_tokens).residual_TD
            ops.gather_rows(residual_TD, step.logits_index[: step.num_logits], gathered_SD)
        if spec.final_norm:
            apply_norm(self._last_norm, self._weights["final_norm"], gathered_SD, gathered_SD)
        if spec.embedding_width:
            gathered_SD, projected_SD = self.workspace.projected(step.num_logits, spec.embedding_width), gathered_SD
            self.linear_method.apply(projected_SD, self._weights["project_out"], gathered_SD)
        self._apply_head(gathered_SD, logits_SV)
        if spec.logits_scale != 1.0 or spec.logits_soft_cap > 0:
            ops.scale_and_cap(logits_SV, spec.logits_scale, spec.logits_soft_cap)
        return logits_SV

    def _embed(self, step: StepInputs, views: TokenViews) -> None:
        """The residual before the first layer."""
        spec, weights, count, residual_TD = self.spec, self._weights, step.num_tokens, views.residual_TD
        ids_T = step.input_ids[:count]
        if step.patches is not None:
            self._embed_patches(step.patches, residual_TD)
        elif step.embedded is not None:
            residual_TD.copy_(step.embedded)
        elif spec.embedding_width:
            embedded = self.workspace.projected(count, spec.embedding_width)
            self._look_up(ids_T, embedded)
            self.linear_method.apply(embedded, weights["project_in"], residual_TD)
        elif spec.reads_items:
            residual_TD.zero_()
        else:
            self._look_up(ids_T, residual_TD)
        if step.media is not None:
            step.media.place(residual_TD)
        if spec.learned_positions is not None and (step.patches is None or step.patches.blend_KT is None):
            ops.add_embedding(step.positions[:count], weights["positions"], residual_TD)
        if spec.token_types:
            ops.add_embedding(cast(torch.Tensor, step.token_types)[:count], weights["token_types"], residual_TD)
        if spec.patches is None or not spec.patches.norms_first:
            self._norm_embedded(residual_TD)
        if self._inputs is not None:
            if step.media is not None:
                ids_T = step.media.ids_of_text(ids_T, self._inputs.input.media_id)
            self._inputs.run(ids_T, residual_TD, self.workspace.inputs[:count])

    def _embed_patches(self, patches: PatchInputs, out_TD: torch.Tensor) -> None:
        """Rows of an image's patches, with class tokens between them, and positions that are sums of several rows."""
        spec, rows_TP = cast(Patches, self.spec.patches), patches.rows_TP
        if spec.norm is not None:
            apply_norm(spec.norm, self._weights["patch_norm"], rows_TP, rows_TP)
        self.linear_method.apply(rows_TP, self._weights["patch"], out_TD)
        if patches.class_rows is not None:
            out_TD[patches.class_rows] = self._weights["class_token"].to(out_TD.dtype)
        if spec.norms_first:
            self._norm_embedded(out_TD)
        if patches.blend_KT is not None and patches.weights_KT is not None:
            row_TD = torch.empty_like(out_TD)
            for index_T, weight_T in zip(patches.blend_KT, patches.weights_KT, strict=True):
                ops.embedding(index_T, self._weights["positions"], row_TD, 1.0)
                out_TD.addcmul_(row_TD, weight_T[:, None])

    def _norm_embedded(self, residual_TD: torch.Tensor) -> None:
        if self.spec.embedding_norm is not None:
            apply_norm(self.spec.embedding_norm, self._weights["embedding_norm"], residual_TD, residual_TD)

    def _look_up(self, ids_T: torch.Tensor, out_TD: torch.Tensor) -> None:
        """Tokens' rows of the embedding."""
        embedding, scale = self._weights["embedding"], self.embedding_scale
        ops.embedding(ids_T, embedding, out_TD, scale)
        self.linear_method.adapt_embedding(ids_T, embedding, out_TD, scale)

    def _apply_head(self, gathered_SD: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """All logits on every rank: each computes those of its tokens, if its head is a part of the whole."""
        head = self.head()
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

    @property
    def embedding(self) -> LinearWeight:
        """The matrix of tokens."""
        return self._weights["embedding"]

    def head(self) -> LinearWeight:
        """The matrix of logits: this rank's rows of it where it has no more, or where they can be had without a copy."""
        if "lm_head" not in self._weights:  # the embedding serves as the head
            embedding, bias = self._weights["embedding"], self._weights.get("lm_head_bias")
            whole = dataclasses.replace(embedding, bias=bias, name="lm_head")
            if self.plan.size > 1 and whole.data is not None:
                rows = self.plan.vocabulary(self.spec.vocab)
                count, bias = rows.stop - rows.start, None if whole.bias is None else whole.bias[rows]
                whole = LinearWeight(count, whole.in_features, whole.dtype, whole.data[rows], bias=bias, name="lm_head")
            self._weights["lm_head"] = whole
        return self._weights["lm_head"]

    def linear(self, module: str) -> LinearWeight:
        """A module's matrix."""
        return self.head() if module == "lm_head" else self._linears[module]

    def fixed(self, module: Module) -> str:
        """Why adapters cannot change a module; empty: they can."""
        if module.fixed or module.kind != "experts":
            return module.fixed
        _, layer, name = module.name.split(".")
        mlp = self._layers[int(layer) - self._mine.start].mlp
        if module.plain or mlp is None or mlp.mixture is None:
            return "has experts of a kind that cannot be adapted"
        return mlp.mixture.fixed(name)

    @property
    def has_whole_head(self) -> bool:
        """Whether this rank computes all logits."""
        return self.head().out_features == self.spec.vocab

    # Construction.

    def _give_weightless_norms(self) -> None:
        """Where the checkpoint's norms have no weights: ones."""
        ones = NormWeight(torch.ones(self.spec.hidden, device=self.device))
        if self.spec.embedding_norm is not None and not self.spec.embedding_norm.weight:
            self._weights["embedding_norm"] = ones
        if not self.spec.norm.weight:
            self._weights["final_norm"] = ones
            for layer in self._layers:
                layer.norms.update(dict.fromkeys(layer.norm_places, ones))

    def _can_narrow(self) -> bool:
        """Whether the last layer can leave out the tokens that need no logits."""
        mixers = self._layers[-1].mixers if self._layers and self.stage.is_last else []
        is_plain = len(mixers) == 1 and self.spec.layer_input is None and self.spec.hyper is None
        return is_plain and mixers[0].can_narrow and not self._layers[-1].placement.parallel

    def _build_workspace(self) -> Workspace:
        spec, context, layers = self.spec, self.context, self._layers
        mlps = [layer.mlp for layer in layers if layer.mlp is not None]
        halves, ends = [*self._mixers(), *mlps], [layer.end for layer in layers if layer.end is not None]
        narrow = max((part.narrow for part in (*halves, *ends)), default=1)
        self.linear_method.reserve(context.max_tokens, max(narrow, spec.hidden), self.device)
        return Workspace(
            max_tokens=context.max_tokens,
            max_logits=context.max_logits if self.stage.is_last else 1,
            hidden=spec.hidden,
            wide=max((half.wide for half in halves), default=1),
            narrow=narrow,
            projected=spec.embedding_width,
            streams=0 if spec.hyper is None else spec.hyper.streams,
            inputs=0 if spec.layer_input is None else spec.layers * spec.layer_input.width,
            sampled=layers[-1].mixers[0].wide if self._can_narrow() else 0,
            has_beside=any(len(layer.mixers) > 1 or layer.placement.parallel for layer in layers)
            or any(mlp.is_whole or mlp.is_late for mlp in mlps),
            vocab=spec.vocab,
            ranks=self.plan.size,
            dtype=context.activation_dtype,
            device=self.device,
        )

    def _list_operations(self, context: LayerContext) -> OperationList:
        operations = OperationList(self.spec, context, self.workspace, is_fused=can_fuse(self.spec, self._layers))
        operations.first_input = self._first_input
        if self._hyper_head is not None and self.stage.is_first:
            operations.begin_streams()
        for number, layer in enumerate(self._layers, self._mine.start):
            if number in self._handed:
                operations.add_copy(self._handed[number], self._count_up)
            is_last = layer is self._layers[-1] and self.spec.layers not in self._handed
            operations.add_layer(layer, number, can_narrow=is_last and self._can_narrow())
            if number in self.spec.taps:
                operations.add_tap()
            if self.spec.vision is not None and number < len(self.spec.vision.taps):
                operations.add_media(number)
        operations.add_delta()
        if operations.late_waits:
            raise stages.cannot_part(f"the output of layer {self._mine[-1]}'s experts joins a later layer")
        if self._hyper_head is not None and self.stage.is_last:
            operations.end_streams(self._hyper_head)
        last_TD = self._handed.get(self.spec.layers)
        if last_TD is not None:
            operations.listed.append(lambda step, views: self._norm_last(views.residual_TD, last_TD[: step.num_tokens]))
        return operations

    def _norm_last(self, residual_TD: torch.Tensor, out_TD: torch.Tensor) -> None:
        if self._hands_normed:
            apply_norm(self._last_norm, self._weights["final_norm"], residual_TD, out_TD)
        else:
            ops.gather_rows(residual_TD, self._count_up[: len(out_TD)], out_TD)

    def describe(self) -> dict[str, Any]:
        """Numbers for `quire explain`: parameters, bytes, pages, layers."""
        return {
            **describe_weights(self.modules, self.plan, self.dtype, self.linear_method, self.spec),
            **describe_pages(self.kv_cache_specs()),
            "workspace_bytes": self.workspace.num_bytes + self.linear_method.scratch_bytes,
            "layers": len(self._layers),
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


def _check_positions(spec: DecoderSpec, max_positions: int) -> int:
    learned = spec.learned_positions
    wanted = max_positions or spec.max_positions
    if learned is not None and wanted > learned.count:
        raise ConfigError(
            f"max_model_len={wanted}, but the model has a table of only {learned.count} positions",
            setting="max_model_len",
        )
    return wanted
