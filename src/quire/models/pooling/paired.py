"""Models of two halves, CLIP and SigLIP: a text or an image becomes a vector, and the vectors of both can be compared.

The text's half is the decoder; an image's is what it sees with, whose one embedding is already the vector.
"""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.sight import Probe, Product
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.clip import LAYER_NAMES, MODEL_TOWER, clip_trunk, tower_names

TEXT, HALVES = "text_model.", ("text_config", "vision_config")
TEXT_NAMES = WeightNames(
    prefixes=("",),
    layer=TEXT + "encoder.layers.{layer}.",
    modules=LAYER_NAMES
    | {
        "embedding": TEXT + "embeddings.token_embedding",
        "positions": TEXT + "embeddings.position_embedding",
        "final_norm": TEXT + "final_layer_norm",
    },
    ignored=("*.position_ids", "logit_scale", "logit_bias", "text_projection.*", TEXT + "head.*"),
)
TOWER_NAMES = WeightNames(
    prefixes=("",),
    layer=MODEL_TOWER + "encoder.layers.{layer}.",
    modules=tower_names(MODEL_TOWER)
    | {
        "projection": "visual_projection",
        "probe": MODEL_TOWER + "head.probe",
        "probe_in": MODEL_TOWER + "head.attention.in_proj_weight",
        "probe_in_bias": MODEL_TOWER + "head.attention.in_proj_bias",
        "probe_out": MODEL_TOWER + "head.attention.out_proj",
        "probe_norm": MODEL_TOWER + "head.layernorm",
        "probe_up": MODEL_TOWER + "head.mlp.fc1",
        "probe_down": MODEL_TOWER + "head.mlp.fc2",
    },
    flattened=("probe",),
    bare=("probe_in",),
    ignored=("*.position_ids",),
)


def _text(hf: HFConfig, eps: float, act: str, length: int, *, causal: bool) -> DecoderSpec:
    hidden, heads = hf.get("hidden_size", 512 if causal else 768), hf.get("num_attention_heads", 8 if causal else 12)
    positions = hf.get("max_position_embeddings", length)
    return DecoderSpec(
        vocab=hf.get("vocab_size", 49408 if causal else 32000),
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 12),
        mixer=Attention(heads, heads, hidden // heads, causal=causal, qkv_bias=True, out_bias=True),
        mlp=MLP(hf.get("intermediate_size", 2048 if causal else 3072), act=hf.get("hidden_act", act), bias=True),
        norm=LayerNorm(hf.get("layer_norm_eps", eps)),
        weights=TEXT_NAMES,
        max_positions=positions,
        learned_positions=LearnedPositions(positions),
        tied_embeddings=True,
    )


def _tower(hf: HFConfig, kind: str) -> DecoderSpec:
    trunk = clip_trunk(HFConfig(hf.to_dict() | {"model_type": kind}))
    has_class = kind == "clip_vision_model"
    trunk = dataclasses.replace(trunk, weights=TOWER_NAMES, final_norm=True)
    return trunk.with_patches(embeds_class=has_class, embeds_all=not has_class)


@register("CLIPModel")
def clip(hf: HFConfig) -> DecoderSpec:
    """CLIP: the last token of a text, the class token of an image."""
    text, vision = (hf.get(half, HFConfig({})) for half in HALVES)
    trunk = _tower(vision, "clip_vision_model")
    seen = VisionSpec(trunk, (Product("projection", hf.get("projection_dim", 512), bias=False),))
    return dataclasses.replace(_text(text, 1e-5, "quick_gelu", 77, causal=True), vision=seen)


@register("SiglipModel")
def siglip(hf: HFConfig) -> DecoderSpec:
    """SigLIP: the last token of a text that is filled up to its full length; of an image what one learned vector attends."""
    text, vision = (hf.get(half, HFConfig({})) for half in HALVES)
    trunk = _tower(vision, "siglip_vision_model")
    count, heads = trunk.max_positions, vision.get("num_attention_heads", 12)
    act, norm = vision.get("hidden_act", "gelu_pytorch_tanh"), trunk.norm
    seen = VisionSpec(trunk, (Probe(count, heads, vision.get("intermediate_size", 3072), act, norm),))
    return dataclasses.replace(_text(text, 1e-6, "gelu_pytorch_tanh", 64, causal=False), vision=seen)
