"""The encoder of GLM-4.1V and later: Qwen-VL's patches and rotation, learned positions that are stretched, and a convolution that
makes one row of four patches before a gated projector."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.sight import Gated, Group, Normed, Product
from quire.models.spec import GatedMLP, VisionSpec
from quire.models.vision.qwen_vl import GATED_NAMES, patches_of, patches_trunk

NAMES = dataclasses.replace(
    GATED_NAMES.but(
        drop=("merge_up",),
        positions="visual.embeddings.position_embedding",
        embedding_norm="visual.post_conv_layernorm",
        final_norm="visual.post_layernorm",
        downsample="visual.downsample",
        merge="visual.merger.proj",
        merge_norm="visual.merger.post_projection_norm",
        merge_gate_up=("visual.merger.gate_proj", "visual.merger.up_proj"),
        merge_down="visual.merger.down_proj",
    ),
    flattened=("downsample",),
)


def glm_ocr_vision(hf: HFConfig) -> VisionSpec:
    """GLM-OCR: no learned positions, but norms of queries and keys, and biases."""
    usual = {"hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "attention_bias": True}
    vision = HFConfig(usual | {"intermediate_size": 4096} | hf.vision_config.to_dict())
    wide = vision.out_hidden_size * vision.get("in_channels", 3)
    seen = glm_vision(HFConfig({"vision_config": vision.to_dict() | {"intermediate_size": wide}}))
    bias = bool(vision.attention_bias)
    names = NAMES.but(("positions", "embedding_norm"), q_norm="attn.q_norm", k_norm="attn.k_norm")
    trunk = dataclasses.replace(
        seen.trunk.with_patches(stretch="", norms_first=False),
        weights=names,
        mlp=GatedMLP(vision.intermediate_size, act=vision.get("hidden_act", "silu"), bias=bias),
        learned_positions=None,
        embedding_norm=None,
    )
    return dataclasses.replace(seen, trunk=trunk.with_attention(qk_norm=trunk.norm, out_bias=bias))


def glm_vision(hf: HFConfig) -> VisionSpec:
    """GLM-4.1V, GLM-4.5V and GLM-4.6V."""
    hf = HFConfig({"hidden_size": 1536, "depth": 24, "num_heads": 12} | hf.vision_config.to_dict())
    hidden, outputs, act = hf.hidden_size, hf.get("out_hidden_size", 4096), hf.get("hidden_act", "silu")
    norm, patches = RMSNorm(hf.get("rms_norm_eps", 1e-5)), patches_of(hf, bias=True, stretch="cubic", norms_first=True)
    positions = (hf.get("image_size", 336) // patches.size) ** 2
    trunk = patches_trunk(hf, hidden, GatedMLP(outputs, act=act), norm, patches, NAMES, positions)
    trunk = trunk.with_attention(qkv_bias=bool(hf.get("attention_bias", False)), out_bias=False)
    projector = (
        Group(patches.merge**2, by_column=True),
        Product("downsample", outputs),
        Product("merge", outputs, bias=False),
        Normed("merge_norm", LayerNorm(1e-5), act="gelu"),
        Product("merge_gate_up", 2 * hf.get("intermediate_size", 13696), bias=False, parts=2),
        Gated(act, gate_first=True),
        Product("merge_down", outputs, bias=False),
    )
    return VisionSpec(dataclasses.replace(trunk, embedding_norm=norm, final_norm=True), projector)
