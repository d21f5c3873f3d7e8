"""Runs a few tokens through a module tree of Transformers twice at load: as its own code would, and as Quire will use it.

The second run gets the tokens in reversed order with their positions, because a step of the engine holds tokens of several
requests: the results may depend on positions and attention only. Attention is computed on plain tensors, from the same
description of a layer that the paged kernels get.

Legend: T tokens, N query heads, K KV heads, H head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from quire.errors import ConfigError

TOKENS = 8
LONGEST_WINDOW = 56
"""Windows up to this are checked with a text that is longer than the window."""
LONGEST_TEXT = 300
"""Characters of an error of a model's own code that a refusal repeats."""
TOLERANCE = 1e-3
"""How far a logprob may differ in float32."""
HALF_TOLERANCE = 5e-2
"""How far logprobs may differ on average in narrower types, whose rounding may send a token to another expert."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """What one attention layer was called with, before sharding. `value_dim`: heads of values may be narrower than keys'."""

    module: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    soft_cap: float
    has_sinks: bool


class Given(torch.nn.Module):
    """Takes the place of the tree's layers, and answers with hidden states that were computed before."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> Given:
        """Where a tree has its layers one level down."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _output_class()(last_hidden_state=self.hidden)


@functools.cache
def _output_class() -> Any:
    """Of answers. One for all steps: torch keeps every class of this kind."""
    from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions

    class Output(MoEModelOutputWithPastAndCrossAttentions):
        def __getattr__(self, name: str) -> None:  # what images were, and the like
            if name.startswith("_"):
                raise AttributeError(name)

    return Output


class _PlainAttention:
    """Attention of one layer over one request, without pages."""

    def __init__(self, heads: Heads, positions: torch.Tensor) -> None:
        self._heads, self._positions = heads, positions

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[1, N, T, H] and [1, K, T, H] to [1, T, N, H]. Sums in order of positions, so that they round as in Transformers."""
        heads, order = self._heads, self._positions.argsort()
        group = heads.heads // heads.kv_heads
        query = query[:, :, order]
        key, value = (part[:, :, order].repeat_interleave(group, dim=1) for part in (key, value))
        scores = query @ key.transpose(2, 3) * heads.scale
        if heads.soft_cap:
            scores = (scores / heads.soft_cap).tanh() * heads.soft_cap
        distance = torch.arange(len(order))[:, None] - torch.arange(len(order))
        hidden = (distance < 0) | (distance >= (heads.window or len(order)))
        scores = scores.float().masked_fill(hidden.to(scores.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(1, -1, len(order), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(order)].to(value.dtype)
        return (weights @ value).transpose(1, 2)[:, self._positions]


@torch.no_grad()
def check_tree(tree: Any, layers: Sequence[Heads], attention: str) -> None:
    """Compare what the engine will compute with Transformers' own eager attention.

    Args:
        tree: as Transformers loaded it, in evaluation mode.
        layers: every attention layer.
        attention: our name among Transformers' attention implementations, which the tree has before and after.

    Raises:
        ConfigError: the logprobs differ, or the tree cannot run.
    """
    config = tree.config
    windows = [layer.window for layer in layers if 0 < layer.window <= LONGEST_WINDOW]
    count = TOKENS + max(windows, default=0)
    tokens = (torch.arange(count) * 13 + 7) % int(config.get_text_config().vocab_size)
    try:
        tree.set_attn_implementation("eager")
        expected_TV = tree(input_ids=tokens[None], use_cache=False).logits[0]
        tree.set_attn_implementation(attention)
        found_TV = _run_reversed(tree, tokens, layers)
    except Exception as error:  # a model's own code may raise anything
        raise refusal(config, f"in a first run of {count} tokens {failure(error)}") from error
    differences_TV = (expected_TV.float().log_softmax(-1) - found_TV.float().log_softmax(-1)).abs()
    is_wide = expected_TV.dtype.itemsize >= 4
    off, allowed = (differences_TV.max(), TOLERANCE) if is_wide else (differences_TV.mean(), HALF_TOLERANCE)
    if not off <= allowed:
        raise refusal(
            config,
            f"over pages its logprobs of {count} tokens differ by {off:.2g} from those of Transformers alone, {allowed:.2g} is "
            f"allowed; its layers depend on more than positions and causal attention",
        )


def _run_reversed(tree: Any, tokens: torch.Tensor, layers: Sequence[Heads]) -> torch.Tensor:
    """Logits [T, V] in order of positions, computed as `TransformersModel` does."""
    positions, prefix = torch.arange(len(tokens)).flip(0), tree.base_model_prefix
    modules = [tree.get_submodule(layer.module) for layer in layers]
    for module, layer in zip(modules, layers, strict=True):
        module.quire_layer = _PlainAttention(layer, positions)
    body, given = getattr(tree, prefix), Given()
    turned = tokens[positions][None]
    given.hidden = body(input_ids=turned, position_ids=positions[None], use_cache=False).last_hidden_state
    setattr(tree, prefix, given)
    try:
        return tree(input_ids=turned, use_cache=False).logits[0].flip(0)
    finally:
        setattr(tree, prefix, body)
        for module in modules:
            del module.quire_layer


def failure(error: Exception) -> str:
    """What a user is told of an error in a model's own code; its traceback has the rest."""
    return f"its own code failed: {in_one_line(error).rstrip('.')}"


def in_one_line(error: Exception) -> str:
    """An error's text without its breaks, at most `LONGEST_TEXT` characters of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def refusal(config: Any, why: str) -> ConfigError:
    """The error for a model that Transformers knows and that cannot run on pages."""
    return ConfigError(
        f"models with model_type={config.model_type!r} ({type(config).__name__} of Transformers) cannot run with paged "
        f"attention: {why}. Choose another model, or run this one with Transformers itself",
        setting="model_impl",
    )
