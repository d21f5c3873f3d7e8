"""Heads that draft without keys and values: Medusa, and the MLP speculator. They read the model's last hidden state of a row.

- Medusa (https://arxiv.org/abs/2401.10774): one head for each guess, some residual layers and a matrix, all over the same state.
- MLP speculator (https://arxiv.org/abs/2404.19124): a state that each guess's embedding changes, one layer and one head a guess.

A head is a table of tensors with their shapes; every rank has the whole. Legend: N rows, D hidden, V vocabulary.
"""

import abc
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional

from quire.config.kv_spec import KVCacheSpec
from quire.errors import ConfigError
from quire.layers.assembly import Sliceable
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM, StepInputs
from quire.models.spec import Features


class PlainHeads(CausalLM):
    """Heads for a model.

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
                raise _refusal(
                    f"{name} has the shape {list(values.shape)}, and its config.json means {list(shapes[known])}"
                )
            else:
                is_whole = not values.is_floating_point()
                self._weights[known] = values.to(self._options["device"], None if is_whole else self._options["dtype"])
        missing = [name for name in shapes if name not in self._weights]
        if missing or unknown:
            raise _refusal(f"its tensors {missing[:8]} are missing and {unknown[:8]} are not known")

    def load_dummy(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = {
            name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in self.shapes().items()
        }
        self.load_weights(drawn.items())


class Medusa(PlainHeads):
    """`num_heads` heads of `num_hidden_layers` residual layers."""

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
    """`n_predict` steps of one layer each; with `tie_weights` they have the same weights, but for the first projection."""

    def _read_fields(self, fields: Mapping[str, Any], hidden: int) -> None:
        if (width := _whole(fields, "emb_dim", default=hidden)) != hidden:
            raise _refusal(f"it reads hidden states of {width}, and the model's have {hidden}")
        self._hidden = hidden
        self.num_heads = _whole(fields, "n_predict", default=3)
        self._inner = _whole(fields, "inner_dim", default=0) or hidden
        self._is_tied, self._scales = bool(fields.get("tie_weights", False)), bool(fields.get("scale_input", False))
        if (tokens := _whole(fields, "vocab_size", default=self.vocab)) != self.vocab:
            raise _refusal(f"it knows {tokens} tokens, and the model {self.vocab}")

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
                raise _refusal(f"{name}={value!r} of its config.json is no whole number")
            return value
    return default


def _normed(x_ND: torch.Tensor) -> torch.Tensor:
    return x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + 1e-6)


def _check_width(fields: Mapping[str, Any], hidden: int) -> None:
    if (width := _whole(fields, "hidden_size", default=hidden)) != hidden:
        raise _refusal(f"its hidden size is {width}, and the model's {hidden}")


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"speculative_config.model cannot be used: {why}", setting="speculative_config")
