"""Heads that draft: a few layers that read what the model has made of its tokens (EAGLE, EAGLE-3, multi-token prediction); and
those without keys and values, which read its last hidden state of a row (Medusa, the MLP speculator).

At the place of each token a head of layers reads the model's features of that token and the embedding of the next one, and
guesses the token after that. Further guesses read what the head itself has left in the place of features. What it does not have
itself, its embedding or its last matrix, is the model's. Matrices that read several vectors side by side are cut when they are
loaded, one part for each vector, and the products are added.

Legend: N rows, T tokens of a pass, S positions that need logits, D hidden, C columns of q, k and v, V vocabulary.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.nn import functional

from quire.config.kv_spec import KVCacheSpec
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.assembly import Sliceable, Weight
from quire.layers.decoder import Decoder
from quire.layers.half import HalfInput
from quire.layers.held_weights import apply_norm
from quire.layers.interface import CausalLM, LayerContext, ModelContext, StepInputs
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.operations import OperationList
from quire.layers.workspace import TokenViews
from quire.models.draft_heads import head_refusal
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


class PlainHeads(CausalLM):
    """Heads without layers: a table of tensors with their shapes. Every rank has the whole.

    Args:
        fields: of the heads' config.json.
        target: the model.
        max_rows: rows that are guessed for at once.

    Attributes:
        num_heads: guesses that can be made.
    """

    can_replay = False  # which head comes next is not in a pass's inputs

    def __init__(self, fields: Mapping[str, Any], target: Decoder, max_rows: int) -> None:
        self.attention_backend, self.vocab = target.attention_backend, target.spec.vocab
        self.features = Features((target.spec.layers,), target.spec.hidden, self.vocab)
        options = {"device": target.device, "dtype": target.context.activation_dtype}
        self._options: dict[str, Any] = options
        self._read_fields(fields, target.spec.hidden)
        self._weights: dict[str, torch.Tensor] = {}
        self._state_ND = torch.zeros(max_rows, target.spec.hidden, **options)
        self._token_N = torch.zeros(max_rows, dtype=torch.int64, device=target.device)
        self._number = 0

    num_heads: int

    @abc.abstractmethod
    def _read_fields(self, fields: Mapping[str, Any], hidden: int) -> None:
        """What the config says. Raises ConfigError: the heads do not fit the model."""

    @abc.abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that there must be, by name."""

    @abc.abstractmethod
    def canonical(self, name: str) -> str:
        """The name in `shapes` of a checkpoint's tensor."""

    @abc.abstractmethod
    def _logits(self, number: int, state_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        """Of the next guess, [N, V]; the state may change."""

    # What a drafter asks.

    @property
    def buffer_bytes(self) -> int:
        return self._state_ND.nbytes + self._token_N.nbytes

    def describe(self) -> dict[str, Any]:
        return {
            "parameters": sum(weight.numel() for weight in self._weights.values()),
            "weight_bytes": sum(weight.nbytes for weight in self._weights.values()),
            "workspace_bytes": self.buffer_bytes,
            "hidden": self._state_ND.shape[1],
            "dtype": str(self._options["dtype"]).removeprefix("torch."),
        }

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return []

    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        pass

    def forward(self, step: StepInputs) -> torch.Tensor:
        count = step.num_logits
        if step.features is None:
            self._token_N[:count], self._number = step.input_ids[:count], self._number + 1
        elif count:
            index_N = step.logits_index[:count].long()
            self._state_ND = step.features[0][index_N]
            self._token_N[:count], self._number = step.input_ids[index_N], 0
        return self._state_ND[:count]

    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        count = step.num_logits
        return self._logits(self._number, self._state_ND[:count], self._token_N[:count]).float()

    # Weights.

    def load_weights(self, weights: Iterable[tuple[str, Sliceable]]) -> None:
        shapes, unknown = self.shapes(), list[str]()
        for name, tensor in weights:
            known = self.canonical(name)
            values = tensor[...]
            if known not in shapes:
                unknown.append(name)
            elif tuple(values.shape) != shapes[known]:
                raise head_refusal(
                    f"{name} has the shape {list(values.shape)}, and its config.json means {list(shapes[known])}"
                )
            else:
                is_whole = not values.is_floating_point()
                self._weights[known] = values.to(self._options["device"], None if is_whole else self._options["dtype"])
        missing = [name for name in shapes if name not in self._weights]
        if missing or unknown:
            raise head_refusal(f"its tensors {missing[:8]} are missing and {unknown[:8]} are not known")

    def load_dummy(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = {
            name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in self.shapes().items()
        }
        self.load_weights(drawn.items())


class Medusa(PlainHeads):
    """One head for each guess (https://arxiv.org/abs/2401.10774): `num_hidden_layers` residual layers and a matrix, all over the
    same state."""

    def _read_fields(self, fields: Mapping[str, Any], hidden: int) -> None:
        _check_width(fields, hidden)
        self._hidden = hidden
        self.num_heads = _whole(fields, "medusa_num_heads", "num_heads", default=5)
        self._num_layers = _whole(fields, "medusa_num_layers", "num_hidden_layers", default=1)
        self._has_bias = bool(fields.get("medusa_fc_bias", False))
        self._num_tokens = _whole(fields, "truncated_vocab_size", "vocab_size", default=self.vocab)
        self._is_shared = bool(fields.get("original_lm_head", False))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        size, shapes = self._hidden, dict[str, tuple[int, ...]]()
        for head in range(self.num_heads):
            for layer in range(self._num_layers):
                shapes[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
                if self._has_bias:
                    shapes[f"blocks.{head}.layers.{layer}.bias"] = (size,)
            if head == 0 or not self._is_shared:
                shapes[f"lm_heads.{head}.weight"] = (self._num_tokens, size)
        return shapes | ({"token_map": (self._num_tokens,)} if self._num_tokens < self.vocab else {})

    def canonical(self, name: str) -> str:
        name = re.sub(r"^medusa_heads?\.", "", name)
        # The authors' own names: a head is a list of layers, and its matrix is the last of them.
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", name)
        return re.sub(rf"^(\d+)\.{self._num_layers}\.weight$", r"lm_heads.\1.weight", name)

    def _logits(self, number: int, state_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        weights, x_ND = self._weights, state_ND
        for layer in range(self._num_layers):
            name = f"blocks.{number}.layers.{layer}"
            x_ND = x_ND + functional.silu(
                functional.linear(x_ND, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
            )
        logits_NV = functional.linear(x_ND, weights[f"lm_heads.{0 if self._is_shared else number}.weight"])
        if "token_map" not in weights:
            return logits_NV
        spread_NV = torch.full((len(x_ND), self.vocab), -torch.inf, device=x_ND.device)
        return spread_NV.index_copy_(1, weights["token_map"].long(), logits_NV.float())


class MLPSpeculator(PlainHeads):
    """A state that each guess's embedding changes (https://arxiv.org/abs/2404.19124): `n_predict` steps of one layer each; with
    `tie_weights` they have the same weights, but for the first projection."""

    def _read_fields(self, fields: Mapping[str, Any], hidden: int) -> None:
        if (width := _whole(fields, "emb_dim", default=hidden)) != hidden:
            raise head_refusal(f"it reads hidden states of {width}, and the model's have {hidden}")
        self._hidden = hidden
        self.num_heads = _whole(fields, "n_predict", default=3)
        self._inner = _whole(fields, "inner_dim", default=0) or hidden
        self._is_tied, self._scales = bool(fields.get("tie_weights", False)), bool(fields.get("scale_input", False))
        if (tokens := _whole(fields, "vocab_size", default=self.vocab)) != self.vocab:
            raise head_refusal(f"it knows {tokens} tokens, and the model {self.vocab}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        count, inner, shapes = self.num_heads, self._inner, dict[str, tuple[int, ...]]()
        for number in range(1 if self._is_tied else count):
            shapes |= {f"emb.{number}.weight": (self.vocab, inner), f"head.{number}.weight": (self.vocab, inner)}
            shapes |= {f"ln.{number}.weight": (inner,), f"ln.{number}.bias": (inner,)}
        for number in range(min(count, 2) if self._is_tied else count):
            shapes[f"proj.{number}.weight"] = (inner, self._hidden if number == 0 else inner)
        return shapes

    def canonical(self, name: str) -> str:
        name = name.removeprefix("speculator.")
        if not self._is_tied:
            return name
        # A checkpoint may repeat what its steps have in common.
        stem, number, rest = name.split(".") if name.count(".") == 2 else (name, "0", "")
        return f"{stem}.{min(int(number), 1 if stem == 'proj' else 0)}.{rest}" if rest and number.isdigit() else name

    def _logits(self, number: int, state_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        weights, place = self._weights, 0 if self._is_tied else number
        share = 0.5 ** (0.5 / self.num_heads)  # of the state before, in what comes
        x_ND = _normed(state_ND) * 0.5**0.5 if self._scales and number == 0 else state_ND
        projection = weights[f"proj.{min(number, 1) if self._is_tied else number}.weight"]
        embedded_ND = weights[f"emb.{place}.weight"][token_N]
        factor = math.sqrt((1 - share * share) * (self._inner / 2)) / share
        x_ND = functional.linear(x_ND, projection) + factor * embedded_ND
        x_ND = _normed(x_ND) * weights[f"ln.{place}.weight"] + weights[f"ln.{place}.bias"]
        self._state_ND = functional.gelu(x_ND)
        return functional.linear(self._state_ND, weights[f"head.{place}.weight"])


PLAIN_HEADS: dict[str, type[PlainHeads]] = {"medusa": Medusa, "mlp_speculator": MLPSpeculator}
"""By `speculative_config.method`."""


def _whole(fields: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of these fields that there is."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 0:
                raise head_refusal(f"{name}={value!r} of its config.json is no whole number")
            return value
    return default


def _normed(x_ND: torch.Tensor) -> torch.Tensor:
    return x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + 1e-6)


def _check_width(fields: Mapping[str, Any], hidden: int) -> None:
    if (width := _whole(fields, "hidden_size", default=hidden)) != hidden:
        raise head_refusal(f"its hidden size is {width}, and the model's {hidden}")
