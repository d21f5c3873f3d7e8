"""Classifiers of images, and encoders that give an image's vectors: ViT.

An image's patches are a whole prompt: what it is seen with has no layers, and the layers behind it are a decoder's.
"""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.spec import DecoderSpec, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.clip import clip_trunk

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
