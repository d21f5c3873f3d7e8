"""Classifiers of images, and encoders that give an image's vectors: ViT.

An image's patches are a whole prompt: what it is seen with has no layers, and the layers behind it are a decoder's.
"""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.sight import Patches
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.pixtral import NO_TOKENS

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
    hidden, heads, layers = (
        hf.get("hidden_size", 768),
        hf.get("num_attention_heads", 12),
        hf.get("num_hidden_layers", 12),
    )
    count, bias = hf.max_position_embeddings, bool(hf.get("qkv_bias", True))
    spec = DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=layers,
        mixer=Attention(heads, heads, hidden // heads, causal=False, qkv_bias=bias, out_bias=True),
        mlp=MLP(hf.get("intermediate_size", 3072), act=hf.get("hidden_act", "gelu"), bias=True),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-12)),
        weights=NAMES,
        max_positions=count,
        tied_embeddings=True,
        reads_items=True,
    )
    patches = Patches(
        hf.get("patch_size", 16), hf.get("num_channels", 3), bias=True, class_token=True, keeps_class=True
    )
    rows = dataclasses.replace(
        spec,
        layers=0,
        learned_positions=LearnedPositions(count),
        final_norm=False,
        patches=patches,
    )
    return dataclasses.replace(spec, vision=VisionSpec(rows, ()))
