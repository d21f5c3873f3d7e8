"""Encoders over squares of one size: CLIP's and SigLIP's, and the projectors behind them (LLaVA, Idefics, Gemma 3 …); those whose
neighbouring rows stand side by side before a projector (pixel shuffle: InternVL, Llama 4, Aya Vision); DeepSeek-VL and Janus."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.residual import Joint, LayerNorm, Norm, RMSNorm
from quire.models.sight import Gated, Group, Normed, Patches, Product, Stage
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


INTERN_NAMES = WeightNames(
    prefixes=("", "model."),
    layer=TOWER + "encoder.layer.{layer}.",
    modules={
        "patch": TOWER + "embeddings.patch_embeddings.projection",
        "class_token": TOWER + "embeddings.cls_token",
        "positions": TOWER + "embeddings.position_embeddings",
        "final_norm": TOWER + "layernorm",
        "before_mixer": "layernorm_before",
        "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "q_norm": "attention.q_norm",
        "k_norm": "attention.k_norm",
        "out": "attention.projection_layer",
        "after_mixer_scale": "lambda_1",
        "before_mlp": "layernorm_after",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "after_mlp_scale": "lambda_2",
        "merge_norm": "multi_modal_projector.layer_norm",
        "up_projection": "multi_modal_projector.linear_1",
        "down_projection": "multi_modal_projector.linear_2",
    },
    flattened=("class_token", "positions"),
    bare=("positions",),
    ignored=("*.mask_token",),
)


def _side(value: int | list[int]) -> int:
    """A length that configs may give once or for both sides."""
    return value if isinstance(value, int) else int(value[0])


def _intern_trunk(hf: HFConfig) -> DecoderSpec:
    """InternViT: what a half gives is multiplied by a learned vector."""
    hidden, heads, eps = hf.get("hidden_size", 1024), hf.get("num_attention_heads", 16), hf.get("layer_norm_eps", 1e-6)
    size, layers, bias = (
        _side(hf.get("patch_size", 14)),
        hf.get("num_hidden_layers", 24),
        hf.get("attention_bias", hf.get("model_type") == "qianfan_ocr_vision"),
    )
    positions = (_side(hf.get("image_size", 448)) // size) ** 2 + 1
    norm: Norm = RMSNorm(eps) if hf.get("norm_type", "layer_norm") == "rms_norm" else LayerNorm(eps)
    qk_norm = RMSNorm(1e-6) if hf.get("use_qk_norm", False) else None
    attention = Attention(heads, heads, hidden // heads, causal=False, qkv_bias=bool(bias), out_bias=True)
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=layers,
        mixer=dataclasses.replace(attention, qk_norm=qk_norm, qk_norm_span="all"),
        mlp=MLP(hf.get("intermediate_size", 4096), act=hf.get("hidden_act", "gelu"), bias=True),
        norm=norm,
        weights=INTERN_NAMES,
        max_positions=positions,
        learned_positions=LearnedPositions(positions),
        final_norm=not hf.get("use_mean_pooling", True),
        tied_embeddings=True,
        joints=((Joint(learned=True), Joint(learned=True)),) * layers,
        patches=Patches(size, hf.get("num_channels", 3), bias=True, class_token=True),
    )


def _side_by_side(trunk: DecoderSpec, merge: int, *stages: Stage) -> VisionSpec:
    """Squares of merge x merge rows before a projector."""
    return VisionSpec(trunk.with_patches(merge=merge), (Group(merge**2), *stages))


def intern_vision(hf: HFConfig) -> VisionSpec:
    """InternVL in Transformers' format."""
    trunk, layer = _intern_trunk(hf.vision_config), hf.get("vision_feature_layer", -1)
    if layer != -1:
        trunk = dataclasses.replace(up_to_layer(trunk, layer), final_norm=False)
    hidden, act = hf.text_config.get("hidden_size", 4096), hf.get("projector_hidden_act", "gelu")
    return _side_by_side(
        trunk,
        round(1 / hf.get("downsample_ratio", 0.5)),
        Normed("merge_norm", LayerNorm(1e-5)),
        Product("up_projection", hidden, act=act),
        Product("down_projection", hidden),
    )


QIANFAN_NAMES = dataclasses.replace(
    INTERN_NAMES.but(
        patch=MODEL_TOWER + "embeddings.patch_embedding",
        class_token=MODEL_TOWER + "embeddings.class_embedding",
        positions=MODEL_TOWER + "embeddings.position_embedding",
        final_norm=MODEL_TOWER + "layernorm",
        before_mixer="norm1",
        qkv="attn.qkv",
        out="attn.proj",
        after_mixer_scale="ls1",
        before_mlp="norm2",
        after_mlp_scale="ls2",
        merge_norm="mlp1.0",
        up_projection="mlp1.1",
        down_projection="mlp1.3",
    ),
    layer=MODEL_TOWER + "encoder.layers.{layer}.",
)


def qianfan_vision(hf: HFConfig) -> VisionSpec:
    """Qianfan-OCR: InternVL under the names of its first checkpoints."""
    seen = intern_vision(hf)
    return dataclasses.replace(seen, trunk=dataclasses.replace(seen.trunk, weights=QIANFAN_NAMES))


LLAMA4_NAMES = dataclasses.replace(
    CLIP_NAMES,
    layer=MODEL_TOWER + "model.layers.{layer}.",
    modules=LAYER_NAMES
    | {
        "before_mixer": "input_layernorm",
        "out": "self_attn.o_proj",
        "before_mlp": "post_attention_layernorm",
        "patch": MODEL_TOWER + "patch_embedding.linear",
        "class_token": MODEL_TOWER + "class_embedding",
        "positions": MODEL_TOWER + "positional_embedding_vlm",
        "embedding_norm": MODEL_TOWER + "layernorm_pre",
        "final_norm": MODEL_TOWER + "layernorm_post",
        "merge_up": MODEL_TOWER + "vision_adapter.mlp.fc1",
        "merge_down": MODEL_TOWER + "vision_adapter.mlp.fc2",
        "projection": "multi_modal_projector.linear_1",
    },
    bare=("positions",),
    flattened=("patch",),
    ignored=(),
    aliases={},
)


def llama4_vision(hf: HFConfig) -> VisionSpec:
    """Llama 4: squares whose patches turn by column and row, beside a class token that does not."""
    usual = {"patch_size": 14, "image_size": 448, "num_hidden_layers": 34, "num_attention_heads": 16} | {
        "intermediate_size": 5632,
        "hidden_act": "gelu",
    }
    vision = HFConfig(usual | hf.vision_config.to_dict() | {"model_type": "clip_vision_model"})
    trunk, parameters = clip_trunk(vision), vision.to_dict().get("rope_parameters") or vision.to_dict()
    each = vision.get("hidden_size", 768) // vision.num_attention_heads // 4
    rope = rotate_rows_and_columns(4 * each, float(parameters.get("rope_theta", 10000.0)))
    rope = dataclasses.replace(rope, axes=rope.axes[::-1], interleaved=True)
    trunk = dataclasses.replace(trunk, weights=LLAMA4_NAMES, final_norm=True).with_patches(class_last=True)
    wide = vision.get("projector_output_dim", 4096)
    return _side_by_side(
        trunk.with_attention(rope=rope),
        round(1 / vision.get("pixel_shuffle_ratio", 0.5)),
        Product("merge_up", vision.get("projector_input_dim", 4096), bias=False, act="gelu"),
        Product("merge_down", wide, bias=False, act="gelu"),
        Product("projection", hf.text_config.get("hidden_size", 5120), bias=False),
    )


def aya_vision(hf: HFConfig) -> VisionSpec:
    """Aya Vision: SigLIP's rows, a norm, and a gated projector."""
    usual = {"hidden_size": 1152, "patch_size": 14, "image_size": 384, "num_hidden_layers": 26}
    usual |= {"num_attention_heads": 14, "intermediate_size": 4304}
    names = CLIP_NAMES.but((), merge_norm="multi_modal_projector.layernorm")
    trunk = dataclasses.replace(siglip_trunk(hf, usual, names), final_norm=False)
    hidden = hf.text_config.get("hidden_size", 8192)
    return _side_by_side(
        up_to_layer(trunk, hf.get("vision_feature_layer", -1)),
        hf.get("downsample_factor", 2),
        Normed("merge_norm", LayerNorm(hf.get("adapter_layer_norm_eps", 1e-6))),
        Product("up_projection", hf.get("alignment_intermediate_size", hidden)),
        Gated("silu"),
        Product("down_projection", hidden),
    )


def cohere_vision(hf: HFConfig) -> VisionSpec:
    """Command A Vision: Aya Vision's projector without a norm, behind SigLIP's own."""
    usual = {"hidden_size": 1152, "intermediate_size": 3072, "image_size": 512, "num_hidden_layers": 27}
    names = dataclasses.replace(CLIP_NAMES, ignored=GEMMA3_NAMES.ignored)
    return _side_by_side(
        siglip_trunk(hf, usual, names),
        hf.get("downsample_factor", 2),
        Product("up_projection", hf.get("alignment_intermediate_size", 36864)),
        Gated("silu"),
        Product("down_projection", hf.text_config.get("hidden_size", 8192)),
    )


DEEPSEEK_NAMES = dataclasses.replace(
    CLIP_NAMES,
    layer=MODEL_TOWER + "encoder.layers.{layer}.",
    modules=tower_names(MODEL_TOWER) | {"up_projection": "aligner.linear1", "down_projection": "aligner.linear2"},
    ignored=("*.position_ids", "*vision_model.head.*"),
    aliases={"vision_model.vision_model.": MODEL_TOWER},
)


def deepseek_vision(hf: HFConfig) -> VisionSpec:
    """DeepSeek-VL: SigLIP and two matrices."""
    hidden, trunk = hf.text_config.get("hidden_size", 4096), siglip_trunk(hf, {}, DEEPSEEK_NAMES)
    return VisionSpec(trunk, (Product("up_projection", hidden, act="gelu"), Product("down_projection", hidden)))


DEEPSEEK2_NAMES = WeightNames(
    prefixes=("",),
    layer="vision.blocks.{layer}.",
    modules={
        "patch": "vision.patch_embed.proj",
        "positions": "vision.pos_embed",
        "before_mixer": "norm1",
        "qkv": "attn.qkv",
        "out": "attn.proj",
        "before_mlp": "norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "final_norm": "vision.norm",
        "row_end": "image_newline",
        "view_end": "view_seperator",
    },
    flattened=("positions",),
    bare=("positions",),
    ignored=("vision.attn_pool.*",),
)


def deepseek2_vision(hf: HFConfig) -> VisionSpec:
    """DeepSeek-VL2: SigLIP's layers over squares, with neighbours side by side before a few matrices.

    Raises:
        ConfigError: images become embeddings in another way.
    """
    vision, made = hf.vision_config, hf.projector_config
    kinds = {"tile_tag": hf.get("tile_tag"), "projector_type": made.get("projector_type", "downsample_mlp_gelu")}
    if kinds != {"tile_tag": "2D", "projector_type": "downsample_mlp_gelu"} or made.get("token_pooling"):
        message = "config.json: DeepSeek-VL2 sees with tile_tag='2D' and projector_type='downsample_mlp_gelu' alone"
        raise ConfigError(f"{message}; found {kinds}", setting="model")
    width, outputs = vision.get("width", 1024), made.get("n_embed", 2048)
    fields = {"hidden_size": width, "intermediate_size": int(width * vision.get("mlp_ratio", 4))}
    fields |= {"num_hidden_layers": vision.get("layers", 24), "num_attention_heads": vision.get("heads", 16)}
    fields |= {"image_size": vision.get("image_size", 384), "patch_size": vision.get("patch_size", 16)}
    first = [f"projection_{number}" for number in range(made.get("depth", 2) - 1)]
    names = {name: f"projector.layers.{2 * number}" for number, name in enumerate((*first, "down_projection"))}
    trunk = siglip_trunk(HFConfig({"vision_config": fields}), {}, DEEPSEEK2_NAMES.but((), **names))
    wide = [Product(name, outputs * made.get("mlp_ratio", 1), act="gelu") for name in first]
    side_by_side = Group(made.get("downsample_ratio", 2) ** 2, by_column=True)
    projector = (side_by_side, *wide, Product("down_projection", outputs))
    return VisionSpec(trunk, projector, between=("row_end", "view_end"), grouped=True)


JANUS_NAMES = dataclasses.replace(
    DEEPSEEK_NAMES.but(
        ("down_projection",),
        out="self_attn.projection_layer",
        up_projection="aligner.fc1",
    ),
    ignored=("*.position_ids", "*vqmodel.*", "*generation_*"),
)


def janus_vision(hf: HFConfig) -> VisionSpec:
    """Janus and Janus-Pro: SigLIP's layers and a few matrices. The parts that draw are not read."""
    vision, hidden = hf.vision_config, hf.vision_config.get("hidden_size", 1024)
    act, outputs = vision.get("hidden_act", "gelu"), vision.get("projection_dim", 2048)
    usual = {"hidden_size": hidden, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 384}
    usual |= {"hidden_act": act, "intermediate_size": int(hidden * vision.get("mlp_ratio", 4.0))}
    others = {f"projection_{n}": f"aligner.hidden_layers.{n}" for n in range(vision.get("depth", 2) - 1)}
    trunk = siglip_trunk(hf, usual, JANUS_NAMES.but((), **others))
    trunk = trunk.with_attention(qkv_bias=bool(vision.get("attention_bias", True)))
    *first, last = ("up_projection", *others)
    return VisionSpec(trunk, (*[Product(name, outputs, act=act) for name in first], Product(last, outputs)))
