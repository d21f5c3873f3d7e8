"""Models of two halves, CLIP and SigLIP: a text or an image becomes a vector, and the vectors of both can be compared; and ViT,
which classifies images, or gives their vectors.

The text's half is the decoder; an image's is what it sees with, whose one embedding is already the vector. ViT's prompt is an
image's patches: what it is seen with has no layers, and the layers behind it are a decoder's.
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


NAMES = WeightNames(
    prefixes=("vit.", ""),
    layer="layers.{layer}.",
    modules={
        "patch": "embeddings.patch_embeddings.projection",
        "class_token": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings",
        "before_mixer": "layernorm_before",
        "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "out": "attention.o_proj",
        "before_mlp": "layernorm_after",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "final_norm": "layernorm",
    },
    flattened=("class_token", "positions"),
    bare=("positions",),
    ignored=("*.mask_token",),
    aliases={
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
)


@register("ViTForImageClassification", "ViTModel")
def vit(hf: HFConfig) -> DecoderSpec:
    """ViT: a class token before the patches, whose row is the answer."""
    usual = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    trunk = clip_trunk(HFConfig(usual | hf.to_dict() | {"model_type": "siglip_vision_model"}))
    positions = LearnedPositions(hf.max_position_embeddings)
    trunk = dataclasses.replace(trunk, weights=NAMES, max_positions=positions.count, reads_items=True)
    rows = dataclasses.replace(trunk, layers=0, learned_positions=positions)
    seen = VisionSpec(rows.with_patches(class_token=True, keeps_class=True), ())
    spec = dataclasses.replace(trunk, patches=None, learned_positions=None, final_norm=True, vision=seen)
    return spec.with_attention(qkv_bias=bool(hf.get("qkv_bias", True)))
