"""The text part of models that also see or hear: where their configs and weights have it, and which other parts they have.

Knows names. Knows no architecture.
"""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.spec import Attention, DecoderSpec

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


def text_only(spec: DecoderSpec) -> DecoderSpec:
    """The spec without eyes and ears: their weights are left where they are, and a position is one number."""

    def on_one_axis(attention: Attention) -> Attention:
        rope = attention.rope
        return attention if rope is None else dataclasses.replace(attention, rope=dataclasses.replace(rope, axes=()))

    weights = dataclasses.replace(spec.weights, ignored=(*spec.weights.ignored, *OTHER_PARTS))
    return dataclasses.replace(spec.map_attention(on_one_axis), vision=None, hearing=None, weights=weights)


def beside_other_parts(spec: DecoderSpec) -> DecoderSpec:
    """The spec, for checkpoints that may have other parts beside it."""
    names = spec.weights
    prefixes = tuple(dict.fromkeys((*names.prefixes, *PREFIXES)))
    weights = dataclasses.replace(names, prefixes=prefixes, ignored=(*names.ignored, *OTHER_PARTS))
    return dataclasses.replace(spec, weights=weights)
