"""A head that drafts (EAGLE, EAGLE-3, multi-token prediction): a few layers that read what the model has made of its tokens.

At the place of each token the head reads the model's features of that token and the embedding of the next one, and guesses the
token after that. Further guesses read what the head itself has left in the place of features. What it does not have itself, its
embedding or its last matrix, is the model's. Matrices that read several vectors side by side are cut when they are loaded, one
part for each vector, and the products are added.

Legend: T tokens of a pass, S positions that need logits, D hidden, C columns of q, k and v, V vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.assembly import Sliceable, Weight
from quire.layers.decoder import Decoder
from quire.layers.half import HalfInput
from quire.layers.held_weights import apply_norm
from quire.layers.interface import LayerContext, ModelContext, StepInputs
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.operations import OperationList
from quire.layers.workspace import TokenViews
from quire.models.residual import RMSNorm
from quire.models.spec import Attention, DecoderSpec, Features

PAIR = "layers.0.pair_qkv"
"""The part of the first layer's matrix that reads the residual; `qkv` reads the embedding."""


class PairInput(HalfInput):
    """The normed embedding and the normed residual side by side.

    Args:
        embedded_TD: where the first is. scratch_TC: for what the second gives.
        weights: has the second's norm and matrix, once they are loaded.
        norms_residual: the residual itself becomes normed.
    """

    def __init__(
        self,
        method: LinearMethod,
        embedded_TD: torch.Tensor,
        scratch_TC: torch.Tensor,
        weights: dict[str, Any],
        norm: RMSNorm,
        *,
        norms_residual: bool,
    ) -> None:
        self._norms_residual = norms_residual
        self._method, self._embedded_TD, self._scratch_TC = method, embedded_TD, scratch_TC
        self._weights, self._norm = weights, norm

    def multiply(self, weight: LinearWeight, out_TN: torch.Tensor, views: TokenViews) -> None:
        count = len(out_TN)
        self._method.apply(self._embedded_TD[:count], weight, out_TN)
        normed_TD = views.residual_TD if self._norms_residual else views.normed_TD
        apply_norm(self._norm, self._weights["hidden_norm"], views.residual_TD, normed_TD)
        self._method.apply(normed_TD, self._weights[PAIR], self._scratch_TC[:count])
        ops.add(self._scratch_TC[:count], out_TN)


class DraftHead(Decoder):
    """A head made from a spec with `features`."""

    def __init__(self, spec: DecoderSpec, context: ModelContext) -> None:
        self.features = cast(Features, spec.features)
        shape, options = (
            (context.max_tokens, spec.hidden),
            {"dtype": context.activation_dtype, "device": context.device},
        )
        self._embedded_TD = torch.zeros(shape, **options)
        self._carried_SD = torch.zeros(context.max_logits, spec.hidden, **options)
        self._count_up = torch.arange(context.max_tokens, dtype=torch.int32, device=context.device)
        self._spread_SV = torch.empty(0)
        self._ids_V = torch.empty(0)
        super().__init__(spec, context)
        kept = [module for module in self.modules if module.name not in self.features.borrows]
        self.modules = [_of_all_tokens(module, self.features.tokens) for module in kept] + _own_modules(spec)
        self._own = {module.name for module in _own_modules(spec)}
        self.sources = weight_table.sources_of(self.modules, spec, self.plan, self.linear_method)

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._embedded_TD.nbytes + self._carried_SD.nbytes + self._spread_SV.nbytes

    # Weights.

    def assemble(self, weights: Iterable[tuple[str, Sliceable]]) -> Iterator[tuple[str, Weight]]:
        return super().assemble(self._cut(weights))

    def _cut(self, weights: Iterable[tuple[str, Sliceable]]) -> Iterator[tuple[str, Sliceable]]:
        """A checkpoint's tensors, those that read several vectors in parts: `fc.weight` as `fc.0.weight`, `fc.1.weight` …"""

        def is_known(name: str) -> bool:
            return weight_table.canonical_name(name, self.sources, self.spec) in self.sources

        for name, tensor in weights:
            stem, _, suffix = name.rpartition(".")
            count = 0
            while is_known(f"{stem}.{count}.weight"):
                count += 1
            if not count:
                yield name, tensor
            elif suffix == "bias":
                yield f"{stem}.0.bias", tensor
            else:
                for part, values in enumerate(tensor[...].chunk(count, dim=-1)):
                    yield f"{stem}.{part}.{suffix}", values.contiguous()

    def _set_weight(self, module: str, weight: Weight) -> None:
        if module == "draft_to_target":
            self._map_tokens(cast(torch.Tensor, weight))
        elif module in self._own:
            if isinstance(weight, LinearWeight):
                weight.name = module
                self._linears[module] = weight
            self._weights[module] = weight
        else:
            super()._set_weight(module, weight)

    def _map_tokens(self, distances_V: torch.Tensor) -> None:
        ids_V = torch.arange(len(distances_V), device=self.device) + distances_V.to(self.device).long().view(-1)
        self._ids_V = ids_V.clamp(0, self.features.tokens - 1)
        self._spread_SV = torch.zeros(len(self._carried_SD), self.features.tokens, device=self.device)

    def borrow(self, model: Decoder) -> None:
        """Take what the head does not have from the model; again whenever the model's weights have changed."""
        for module in self.features.borrows:
            self._weights[module] = model.head() if module == "lm_head" else model.embedding
            if module == "embedding":
                self.embedding_scale = model.embedding_scale

    def masked(self, max_tokens: int) -> tuple[torch.Tensor, ...]:
        """Features [max_tokens, D] of tokens that are not known yet: the same for each. Raises ConfigError: it has none."""
        if not self.features.masked:
            raise ConfigError(
                "speculative_config.parallel_drafting cannot be used: the head has no mask_hidden, so it was not trained for it",
                setting="speculative_config",
            )
        vector = cast(torch.Tensor, self._weights["masked"]).view(-1).to(self._embedded_TD.dtype)
        return tuple(part_D.expand(max_tokens, -1).contiguous() for part_D in vector.chunk(len(self.features.layers)))

    # One pass.

    def forward(self, step: StepInputs) -> torch.Tensor:
        residual_TD = super().forward(step)
        ops.gather_rows(residual_TD, step.logits_index[: step.num_logits], self._carried_SD[: step.num_logits])
        return residual_TD

    def spread(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Logits of the model's tokens: minus infinity for those that the head does not know."""
        if not self.features.maps_tokens:
            return logits_SV
        spread_SV = self._spread_SV[: len(logits_SV)].fill_(-torch.inf)
        return spread_SV.index_copy_(1, self._ids_V, logits_SV)

    def _embed(self, step: StepInputs, views: TokenViews) -> None:
        count, given, weights = step.num_tokens, step.features, self._weights
        embedded_TD = self._embedded_TD[:count]
        self._look_up(step.input_ids[:count], embedded_TD)
        if self.features.is_beside:
            apply_norm(self.spec.norm, self._layers[0].norms["before_mixer"], embedded_TD, embedded_TD)
            if given is None:
                ops.gather_rows(self._carried_SD, self._count_up[:count], views.residual_TD)
            else:
                self._project([features_TD[:count] for features_TD in given], views)
            return
        hidden_TD = (self._carried_SD if given is None else given[0])[:count]
        if self.features.normed:
            apply_norm(self.spec.norm, weights["token_norm"], embedded_TD, embedded_TD)
            apply_norm(self.spec.norm, weights["hidden_norm"], hidden_TD, views.normed_TD)
            hidden_TD = views.normed_TD
        self._project([embedded_TD, hidden_TD], views)

    def _project(self, vectors: list[torch.Tensor], views: TokenViews) -> None:
        """residual = the vectors side by side @ weight.T + bias."""
        method, weights = self.linear_method, self._weights
        method.apply(vectors[0], weights["features_0"], views.residual_TD)
        for number, x_TD in enumerate(vectors[1:], 1):
            method.apply(x_TD, weights[f"features_{number}"], views.delta_TD)
            ops.add(views.delta_TD, views.residual_TD)

    def _can_narrow(self) -> bool:
        return False

    def _list_operations(self, context: LayerContext) -> OperationList:
        if not self.features.is_beside:
            return super()._list_operations(context)
        columns = self._layers[0].mixers[0].wide
        scratch_TC = torch.zeros(context.max_tokens, columns, dtype=context.activation_dtype, device=context.device)
        norm = cast(RMSNorm, self.spec.norm)
        given = (self.linear_method, self._embedded_TD, scratch_TC, self._weights, norm)
        self._first_input = PairInput(*given, norms_residual=self.features.norms_residual)
        return super()._list_operations(context)


def _of_all_tokens(module: Module, tokens: int) -> Module:
    """The embedding has the model's tokens, whatever the head guesses."""
    return dataclasses.replace(module, parts=(RowBlock(tokens, tokens),)) if module.name == "embedding" else module


def _own_modules(spec: DecoderSpec) -> list[Module]:
    """What a head has besides layers."""
    features, builder = cast(Features, spec.features), ModuleBuilder(spec)
    widths = [features.width] * len(features.layers) if features.is_beside else [spec.hidden, features.width]
    modules = [
        builder.linear(f"features_{number}", (builder.hidden,), width, bias=features.bias and number == 0)
        for number, width in enumerate(widths)
    ]
    if features.is_beside:
        mixer = cast(Attention, spec.mixers_of(0)[0])
        heads = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
        parts = tuple(RowBlock(count * mixer.head_dim, count) for count in heads)
        modules.append(dataclasses.replace(builder.linear("pair_qkv", parts, shard="rows"), name=PAIR))
    if features.is_beside or features.normed:
        modules.append(builder.norm("hidden_norm", spec.norm, spec.hidden if features.is_beside else features.width))
    if features.normed:
        modules.append(builder.norm("token_norm", spec.norm, spec.hidden))
    if features.masked:
        width = features.width * len(features.layers)
        modules.append(builder.vector("masked", RowBlock(width, 1)))
    if features.maps_tokens:
        modules.append(builder.table("draft_to_target", (RowBlock(spec.vocab, 1),)))
    return modules
