"""CLIP's and SigLIP's encoders, and the projector of LLaVA 1.5 behind them."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.sight import Group, Normed, Patches, Product
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.any_size import NO_TOKENS, PIXTRAL_NAMES, TOWER, pixtral_trunk, rotate_rows_and_columns

LAYER_NAMES: dict[str, str | tuple[str, ...]] = {
    "before_mixer": "layer_norm1",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": "self_attn.out_proj",
    "before_mlp": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def tower_names(tower: str) -> dict[str, str | tuple[str, ...]]:
    """The names of CLIP's and SigLIP's matrices in a tower of this name."""
    return LAYER_NAMES | {
        "patch": tower + "embeddings.patch_embedding",
        "class_token": tower + "embeddings.class_embedding",
        "positions": tower + "embeddings.position_embedding",
        "embedding_norm": tower + "pre_layrnorm",
        "final_norm": tower + "post_layernorm",
    }


CLIP_NAMES = WeightNames(
    prefixes=("", "model."),
    layer=TOWER + "encoder.layers.{layer}.",
    modules=tower_names(TOWER)
    | {
        "up_projection": "multi_modal_projector.linear_1",
        "down_projection": "multi_modal_projector.linear_2",
        "row_end": "image_newline",
    },
    ignored=("*.position_ids", "*vision_tower.*post_layernorm.*", "*vision_tower.*head.*"),
    aliases={"vision_tower.vision_model.": TOWER},
)


def clip_trunk(hf: HFConfig) -> DecoderSpec:
    """The layers of CLIP's or SigLIP's encoder: `vision_config`, with the defaults of its model type."""
    is_clip = hf.get("model_type", "clip_vision_model") == "clip_vision_model"
    hidden, heads = hf.get("hidden_size", 768), hf.get("num_attention_heads", 12)
    size = hf.get("patch_size", 32 if is_clip else 16)
    side = hf.get("image_size", 224) // size
    norm = LayerNorm(hf.get("layer_norm_eps", 1e-5 if is_clip else 1e-6))
    act = hf.get("hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh")
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 12),
        mixer=Attention(heads, heads, hidden // heads, causal=False, qkv_bias=True, out_bias=True),
        mlp=MLP(hf.get("intermediate_size", 3072), act=act, bias=True),
        norm=norm,
        weights=CLIP_NAMES,
        max_positions=side**2 + is_clip,
        learned_positions=LearnedPositions(side**2 + is_clip),
        embedding_norm=norm if is_clip else None,
        final_norm=False,
        tied_embeddings=True,
        patches=Patches(size, hf.get("num_channels", 3), bias=not is_clip, class_token=is_clip),
    )


def siglip_trunk(hf: HFConfig, usual: dict[str, Any], names: WeightNames) -> DecoderSpec:
    """SigLIP's layers and its last norm, as `vision_config` describes them, whatever it is called there.

    Args:
        usual: what it need not say.
    """
    fields = usual | hf.vision_config.to_dict() | {"model_type": "siglip_vision_model"}
    return dataclasses.replace(clip_trunk(HFConfig(fields)), weights=names, final_norm=True)


TRUNKS = {"clip_vision_model": clip_trunk, "siglip_vision_model": clip_trunk, "pixtral": pixtral_trunk}


def trunk_of(hf: HFConfig) -> DecoderSpec:
    """The trunk that `vision_config` describes.

    Raises:
        ConfigError: it is of another kind.
    """
    kind = hf.get("model_type", "clip_vision_model")
    if kind not in TRUNKS:
        raise ConfigError(
            f"vision_config.model_type={kind!r} of config.json is not known; known: {', '.join(TRUNKS)}",
            setting="model",
        )
    return TRUNKS[kind](hf)


def up_to_layer(trunk: DecoderSpec, layers: int | list[int]) -> DecoderSpec:
    """The trunk as far as features are read: behind one layer, or several (counted as hidden states are: 0 is the embedding,
    -1 the last)."""
    wanted = [layers] if isinstance(layers, int) else list(layers)
    ends = [end + trunk.layers + 1 if end < 0 else end for end in wanted]
    last = max(ends)
    ignored = tuple(f"*{trunk.weights.layer.format(layer=layer)}*" for layer in range(last, trunk.layers))
    # Checkpoints may have another name for the tower's outer module.
    ignored += tuple(name.replace(TOWER, TOWER + "vision_model.") for name in ignored)
    weights = dataclasses.replace(trunk.weights, ignored=(*trunk.weights.ignored, *ignored))
    taps = () if isinstance(layers, int) else tuple(end - 1 for end in ends)
    return dataclasses.replace(trunk, layers=last, weights=weights, taps=taps)


MODEL_TOWER = "vision_model."
"""What others call it."""
IDEFICS_NAMES = dataclasses.replace(
    CLIP_NAMES,
    layer=MODEL_TOWER + "encoder.layers.{layer}.",
    modules=tower_names(MODEL_TOWER) | {"projection": "connector.modality_projection.proj"},
    ignored=("*.position_ids",),
    aliases={},
)


def idefics_vision(hf: HFConfig) -> VisionSpec:
    """Idefics3 and SmolVLM: SigLIP's layers over squares of one size; neighbours stand side by side before one matrix."""
    usual = {"patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16}
    trunk, scale = siglip_trunk(hf, usual, IDEFICS_NAMES), hf.get("scale_factor", 2)
    hidden = hf.text_config.get("hidden_size", 4096)
    return VisionSpec(trunk.with_patches(merge=scale), (Group(scale**2), Product("projection", hidden, bias=False)))


def mistral_vision(hf: HFConfig) -> VisionSpec:
    """Mistral 3: Pixtral's encoder, whose neighbours become one."""
    merge = hf.get("spatial_merge_size", 2)
    trunk = up_to_layer(pixtral_trunk(hf.vision_config), hf.get("vision_feature_layer", -1))
    hidden, bias = hf.text_config.get("hidden_size", 4096), bool(hf.get("multimodal_projector_bias", False))
    projector = (
        Normed("merge_norm", RMSNorm(hf.text_config.get("rms_norm_eps", 1e-5))),
        Group(merge**2, by_column=True),
        Product("merge", trunk.hidden, bias=False),
        Product("up_projection", hidden, bias, act=hf.get("projector_hidden_act", "gelu")),
        Product("down_projection", hidden, bias),
    )
    return VisionSpec(trunk.with_patches(merge=merge), projector)


GEMMA3_NAMES = dataclasses.replace(
    CLIP_NAMES.but(
        merge_norm="multi_modal_projector.mm_soft_emb_norm",
        projection="multi_modal_projector.mm_input_projection_weight",
    ),
    transposed=("projection",),
    bare=("projection",),
    ignored=("*.position_ids", "*vision_tower.*head.*"),
)


SO400M: dict[str, Any] = {
    "patch_size": 14,
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
}
"""SigLIP's largest encoder, which Gemma's models see with."""


def paligemma_vision(hf: HFConfig) -> VisionSpec:
    """PaliGemma 1 and 2: SigLIP's rows and a matrix."""
    names = GEMMA3_NAMES.but(projection="multi_modal_projector.linear")
    names = dataclasses.replace(names, transposed=(), bare=(), prefixes=("", "model.", "vlm."))
    hidden = hf.text_config.get("hidden_size", 2048)
    return VisionSpec(siglip_trunk(hf, SO400M, names), (Product("projection", hidden),))


def gemma3_vision(hf: HFConfig) -> VisionSpec:
    """Gemma 3: SigLIP's rows, the mean of each square of neighbours, a norm and a matrix."""
    trunk = siglip_trunk(hf, SO400M | {"image_size": 896}, GEMMA3_NAMES)
    side = round((trunk.max_positions / hf.get("mm_tokens_per_image", 256)) ** 0.5)
    return VisionSpec(
        trunk.with_patches(merge=side),
        (
            Group(side**2, is_mean=True),
            Normed("merge_norm", RMSNorm(trunk.norm.eps, weight_offset=1.0)),
            Product("projection", hf.text_config.get("hidden_size", 2304), bias=False),
        ),
    )


PADDLE_NAMES = dataclasses.replace(
    CLIP_NAMES,
    layer="visual." + MODEL_TOWER + "encoder.layers.{layer}.",
    modules=tower_names("visual." + MODEL_TOWER)
    | {
        "merge_norm": "projector.pre_norm",
        "up_projection": "projector.linear_1",
        "down_projection": "projector.linear_2",
    },
    flattened=("patch",),
    ignored=("*.position_ids", "*.packing_position_embedding.*", "*vision_model.head.*"),
    aliases={"mlp_AR.": "projector."},
)


def paddle_vision(hf: HFConfig) -> VisionSpec:
    """PaddleOCR-VL: SigLIP's layers over images of any size, with rotation; neighbours stand side by side before two matrices."""
    trunk = siglip_trunk(hf, SO400M | {"image_size": 384}, PADDLE_NAMES)
    merge, rope = hf.vision_config.get("spatial_merge_size", 2), rotate_rows_and_columns(trunk.attentions()[0].head_dim)
    trunk = trunk.with_patches(merge=merge, is_cut=True, stretch="linear")
    projector = (
        Normed("merge_norm", LayerNorm(1e-5)),
        Group(merge**2),
        Product("up_projection", trunk.hidden * merge**2, act="gelu"),
        Product("down_projection", (hf.get("text_config") or hf).hidden_size),
    )
    return VisionSpec(trunk.with_attention(rope=rope), projector)


LIGHTON_NAMES = dataclasses.replace(
    PIXTRAL_NAMES,
    layer="vision_encoder.transformer.layers.{layer}.",
    modules={
        name: source.replace(TOWER, "vision_encoder.").replace("multi_modal_projector.", "vision_projection.")
        if isinstance(source, str)
        else source
        for name, source in PIXTRAL_NAMES.modules.items()
    },
)


def lighton_vision(hf: HFConfig) -> VisionSpec:
    """LightOnOCR: Mistral 3's encoder under other names."""
    usual = {"patch_size": 14, "head_dim": 64, "hidden_act": "silu"}
    seen = mistral_vision(HFConfig(hf.to_dict() | {"vision_config": usual | hf.vision_config.to_dict()}))
    norm = Normed("merge_norm", RMSNorm(1e-6))
    return VisionSpec(dataclasses.replace(seen.trunk, weights=LIGHTON_NAMES), (norm, *seen.projector[1:]))


def llava_vision(hf: HFConfig) -> VisionSpec:
    """LLaVA 1.5: the rows of one of the last layers, and two matrices."""
    trunk = up_to_layer(trunk_of(hf.vision_config), hf.get("vision_feature_layer", -2))
    strategy, has_class = (
        hf.get("vision_feature_select_strategy", "default"),
        trunk.patches is not None and trunk.patches.class_token,
    )
    if (strategy == "full") == has_class:
        known = "default" if has_class else "full"
        message = f"vision_feature_select_strategy={strategy!r} of config.json is not supported; known: {known!r}"
        raise ConfigError(message, setting="model")
    hidden, bias = hf.text_config.get("hidden_size", 4096), bool(hf.get("multimodal_projector_bias", True))
    return VisionSpec(
        trunk,
        (
            Product("up_projection", hidden, bias, act=hf.get("projector_hidden_act", "gelu")),
            Product("down_projection", hidden, bias),
        ),
    )


def vipllava_vision(hf: HFConfig) -> VisionSpec:
    """ViP-LLaVA: LLaVA over the rows of several layers side by side, behind a norm."""
    seen = llava_vision(HFConfig({"vision_feature_layer": [-2, -5, -8, -11, 6]} | hf.to_dict()))
    names = seen.trunk.weights.but(merge_norm="multi_modal_projector.projector_layernorm")
    norm = Normed("merge_norm", LayerNorm(hf.get("projector_layernorm_eps", 1e-5)))
    return VisionSpec(dataclasses.replace(seen.trunk, weights=names), (norm, *seen.projector))


def llava_next_vision(hf: HFConfig) -> VisionSpec:
    """LLaVA-NeXT (1.6): LLaVA over the squares of an image, and of the whole image made small; a learned embedding ends each
    row."""
    return dataclasses.replace(llava_vision(hf), between=("row_end",))


def llava_onevision_vision(hf: HFConfig) -> VisionSpec:
    """LLaVA-OneVision: as LLaVA-NeXT, over SigLIP; a config need not name the layer and the strategy."""
    usual = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return llava_next_vision(HFConfig(usual | hf.to_dict()))
