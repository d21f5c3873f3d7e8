"""What configs of many families say in the same way: defaults, which layers see a window, slopes of attention by distance; where
the configs and weights of models that also see or hear have their text."""

import dataclasses
import math
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.residual import PRE, RESIDUAL_PRE, LayerNorm, Placement
from quire.models.spec import Attention, DecoderSpec, EncoderSpec
from quire.models.variants import CrossAttention


def defaults(hf: HFConfig, **values: Any) -> HFConfig:
    """The config with values for what it leaves out."""
    return HFConfig(values | {name: value for name, value in hf.to_dict().items() if value is not None})


def renamed(hf: HFConfig, **names: str) -> HFConfig:
    """The config with further names for some of its values: new name = old name."""
    return HFConfig(hf.to_dict() | {new: hf.get(old) for new, old in names.items() if hf.get(old) is not None})


def kinds_of(hf: HFConfig, *known: str) -> list[str] | None:
    """`layer_types`, if the config has it.

    Raises:
        ConfigError: a layer is of another kind than those known.
    """
    kinds = hf.get("layer_types")
    if unknown := {*(kinds or ())} - {*known}:
        raise ConfigError(
            f"layer_types of config.json has {', '.join(map(repr, unknown))}; known: {', '.join(known)}",
            setting="model",
        )
    return kinds


def sliding_layers(hf: HFConfig, every: int = 0) -> tuple[bool, ...]:
    """For each layer, whether it has a window: by `layer_types`, else every n-th layer is full.

    Args:
        every: n where the config gives none; 0 means that all layers are alike.
    """
    types = kinds_of(hf, "sliding_attention", "full_attention")
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or every
    if isinstance(pattern, str):  # "LLLG": local and global layers, repeated
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(hf.num_hidden_layers))
    return tuple(not pattern or (layer + 1) % pattern != 0 for layer in range(hf.num_hidden_layers))


def with_layers(spec: DecoderSpec, layers: tuple[bool, ...], **changes: Any) -> DecoderSpec:
    """A copy in which the attention of the layers that are named has these fields."""
    attentions = spec.attentions()
    mixers: tuple[Attention, ...] = tuple(
        dataclasses.replace(mixer, **changes) if is_meant else mixer
        for mixer, is_meant in zip(attentions, layers, strict=True)
    )
    return dataclasses.replace(spec, mixer=mixers)


def full_where_not_sliding(spec: DecoderSpec, hf: HFConfig, every: int = 0, **changes: Any) -> DecoderSpec:
    """A copy in which some layers have the config's window and the others see the whole context; `changes` are for these."""
    spec = spec.with_attention(window=hf.get("sliding_window", 0))
    return with_layers(spec, tuple(not sliding for sliding in sliding_layers(hf, every)), window=0, **changes)


def alibi_slopes(heads: int, most: float = 8.0, skip_first: bool = False) -> tuple[float, ...]:
    """Slopes of ALiBi (Press et al. 2022): a geometric series that ends at 2 ** -most for a power of two; otherwise that of the
    next smaller power and every other one of the next larger power's, or (`skip_first`) all of the larger's, of which every
    other one comes first."""

    def series(count: int) -> list[float]:
        return [2 ** (-most * (head + 1) / count) for head in range(count)]

    power = 2 ** int(math.log2(heads))
    if power == heads:
        return tuple(series(heads))
    larger = series(2 * power)
    return tuple((larger[1::2] + larger[::2])[:heads] if skip_first else series(power) + larger[::2][: heads - power])


def residual_placement(hf: HFConfig) -> Placement:
    """Norms before halves; BLOOM's kin may go on with what a norm gave rather than with what it read."""
    return RESIDUAL_PRE if hf.get("apply_residual_connection_post_layernorm", False) else PRE


def layer_norm_of(hf: HFConfig, bias: bool = True) -> LayerNorm:
    """A layer norm with the config's epsilon, by any of its names."""
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps")
    return LayerNorm(float(next((hf.get(name) for name in names if hf.get(name) is not None), 1e-5)), bias=bias)


SUBLAYERS = 2
"""Layers of ours that make one of a decoder beside an encoder."""


def with_cross_attention(spec: DecoderSpec, encoder: EncoderSpec) -> DecoderSpec:
    """A decoder's spec whose layers are of the checkpoint's, each made of two halves of ours: attention to the tokens before;
    then attention to what the encoder has read, with the feed-forward behind it."""
    mlp = spec.mlp
    assert not isinstance(mlp, tuple)
    own = spec.attentions()
    shared = {
        name: getattr(own[0], name) for name in ("heads", "kv_heads", "head_dim", "qkv_bias", "out_bias", "scale")
    }
    cross = CrossAttention(**shared, causal=False, length=encoder.length)
    return dataclasses.replace(
        spec,
        layers=SUBLAYERS * spec.layers,
        mixer=tuple(mixer for each in own for mixer in (each, cross)),
        mlp=(None, mlp) * spec.layers,
        weights=dataclasses.replace(spec.weights, sublayers=SUBLAYERS),
        encoder=encoder,
    )


PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "model.",
    "vlm.language_model.",
    "vlm.language_model.model.",
    "vlm.model.",
    "language.model.",
    "thinker.model.",
    "thinker.",
)
OTHER_PARTS = (
    "*vision_tower.*",
    "*vision_embedder.*",
    "*vision_encoder.*",
    "*vision_backbone.*",
    "vision.*",
    "*view_seperator",
    "*wte.new_embedding",
    "*vision_projection.*",
    "*aligner.*",
    "*vision_embed_tokens.*",
    "*vision_model.*",
    "*connector.modality_projection.*",
    "*projector.*",
    "*mlp_AR.*",
    "*image_newline",
    "*visual.*",
    "*embed_vision.*",
    "*vqmodel.*",
    "mlp1.*",
    "*generation_*",
    "encoder.*",
    "model.encoder.*",
    "*audio_tower.*",
    "*embed_audio.*",
    "*embed_tokens_extend.*",
)


def nested_text(hf: HFConfig) -> HFConfig | None:
    """The fields of `text_config`, over those beside it; None where the config itself describes the text."""
    text = hf.get("text_config")
    if not isinstance(text, HFConfig) or any(name in hf for name in ("hidden_size", "num_hidden_layers")):
        return None
    beside = {name: value for name, value in hf.to_dict().items() if name != "text_config"}
    own = {name: value for name, value in text.to_dict().items() if name not in ("architectures", "model_type")}
    return HFConfig(beside | own)


def with_rope(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """A copy in which every rotation of attention has these fields."""

    def changed(attention: Attention) -> Attention:
        rope = attention.rope
        return attention if rope is None else dataclasses.replace(attention, rope=dataclasses.replace(rope, **changes))

    return spec.map_attention(changed)


def text_only(spec: DecoderSpec) -> DecoderSpec:
    """The spec without eyes and ears: their weights are left where they are, and a position is one number."""
    weights = dataclasses.replace(spec.weights, ignored=(*spec.weights.ignored, *OTHER_PARTS))
    return dataclasses.replace(with_rope(spec, axes=()), vision=None, hearing=None, weights=weights)


def beside_other_parts(spec: DecoderSpec) -> DecoderSpec:
    """The spec, for checkpoints that may have other parts beside it."""
    names = spec.weights
    prefixes = tuple(dict.fromkeys((*names.prefixes, *PREFIXES)))
    weights = dataclasses.replace(names, prefixes=prefixes, ignored=(*names.ignored, *OTHER_PARTS))
    return dataclasses.replace(spec, weights=weights)
