"""Gemma 4's eyes: an encoder whose heads turn by column in their first half and by row in their second, and which keeps the
means of squares of patches. The eyes and ears of the unified model have no layers."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.models.residual import SANDWICH, LayerNorm, Norm, RMSNorm
from quire.models.sight import Group, Normed, Patches, Product, Stage, Standard
from quire.models.spec import Attention, DecoderSpec, GatedMLP, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.any_size import NO_TOKENS, TOWER, rotate_rows_and_columns

NAMES = WeightNames(
    prefixes=("", "model."),
    layer=TOWER + "encoder.layers.{layer}.",
    modules={
        "patch": TOWER + "patch_embedder.input_proj",
        "positions": TOWER + "patch_embedder.position_embedding_table",
        "before_mixer": "input_layernorm",
        "qkv": ("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "out": "self_attn.o_proj.linear",
        "after_mixer": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "gate_up": ("mlp.gate_proj.linear", "mlp.up_proj.linear"),
        "down": "mlp.down_proj.linear",
        "after_mlp": "post_feedforward_layernorm",
        "standard_bias": TOWER + "std_bias",
        "standard_scale": TOWER + "std_scale",
        "projection": "embed_vision.embedding_projection",
    },
    flattened=("patch", "positions"),
    bare=("positions",),
)
EPS = 1e-6


def gemma4_vision(hf: HFConfig) -> VisionSpec:
    """Gemma 4 E2B, E4B, 26B-A4B and 31B."""
    outputs, hf = hf.text_config.get("hidden_size", 2304), hf.vision_config
    heads, head_dim, hidden = hf.get("num_attention_heads", 12), hf.get("head_dim", 64), hf.get("hidden_size", 768)
    norm, positions = RMSNorm(hf.get("rms_norm_eps", EPS)), 2 * hf.get("position_embedding_size", 10240)
    rope = rotate_rows_and_columns(
        head_dim, float((hf.to_dict().get("rope_parameters") or {}).get("rope_theta", 100.0))
    )
    attention = Attention(
        heads,
        hf.get("num_key_value_heads", 12),
        head_dim,
        dataclasses.replace(rope, axes=rope.axes[::-1], in_halves=True),
        causal=False,
        qk_norm=norm,
        v_norm=dataclasses.replace(norm, weight=False),
        scale=1.0,
    )
    pool = hf.get("pooling_kernel_size", 3)
    trunk = DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 16),
        mixer=attention,
        mlp=GatedMLP(hf.get("intermediate_size", 3072), act=hf.get("hidden_activation", "gelu_pytorch_tanh")),
        norm=norm,
        weights=NAMES,
        max_positions=positions,
        placement=SANDWICH,
        learned_positions=LearnedPositions(positions),
        final_norm=False,
        tied_embeddings=True,
        patches=Patches(hf.get("patch_size", 16), merge=pool, stretch="apart", channels_last=True),
        bounded=bool(hf.get("use_clipped_linears", False)),
    )
    means = (Group(pool**2, is_mean=True), Standard(hidden**0.5, bool(hf.get("standardize", False))))
    return VisionSpec(trunk, (*means, *embedder(norm, outputs)))


UNIFIED = "vision_embedder."
UNIFIED_NAMES = WeightNames(
    prefixes=("", "model."),
    modules={
        "patch_norm": UNIFIED + "patch_ln1",
        "patch": UNIFIED + "patch_dense",
        "embedding_norm": UNIFIED + "patch_ln2",
        "positions": UNIFIED + "pos_embedding",
        "position_norm": UNIFIED + "pos_norm",
        "projection": "embed_vision.embedding_projection",
    },
    flattened=("patch", "positions"),
    bare=("positions",),
)


def without_layers(hidden: int, norm: Norm, weights: WeightNames, **others: Any) -> DecoderSpec:
    """Rows as they are read."""
    spec = DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=0,
        mixer=(),
        mlp=(),
        norm=norm,
        weights=weights,
        max_positions=1,
        final_norm=False,
        tied_embeddings=True,
    )
    return dataclasses.replace(spec, **others)


def unified_vision(hf: HFConfig) -> VisionSpec:
    """Gemma 4 12B: a square of pixels is an embedding, with three norms and two matrices on its way."""
    outputs, hf = hf.text_config.get("hidden_size", 2304), hf.vision_config
    pool, norm, layer_norm = hf.get("pooling_kernel_size", 3), RMSNorm(hf.get("rms_norm_eps", EPS)), LayerNorm(1e-5)
    count = 2 * hf.get("mm_posemb_size", 1120)
    size = pool * hf.get("patch_size", 16)
    trunk = without_layers(
        hf.get("mm_embed_dim", 3840),
        norm,
        UNIFIED_NAMES,
        max_positions=count,
        learned_positions=LearnedPositions(count),
        embedding_norm=layer_norm,
        patches=Patches(size, bias=True, stretch="turns", channels_last=True, norms_first=True, norm=layer_norm),
    )
    return VisionSpec(trunk, (Normed("position_norm", layer_norm), *embedder(norm, outputs)))


def embedder(norm: RMSNorm, outputs: int) -> tuple[Stage, ...]:
    """What all of Gemma 4's eyes and ears end with."""
    return Normed("merge_norm", dataclasses.replace(norm, weight=False)), Product("projection", outputs, bias=False)
