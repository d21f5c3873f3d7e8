"""Encoders of images of any size, whose heads turn by row and column: Pixtral; Qwen2-VL, Qwen2.5-VL and Qwen3-VL, of whose
patches four make an embedding; GLM-4.1V and later, with stretched positions and a gated projector."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.patterns import with_rope
from quire.models.residual import LayerNorm, Norm, RMSNorm
from quire.models.rope import Rope
from quire.models.sight import Gated, Group, Normed, Patches, Product, Stage
from quire.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    FeedForward,
    GatedMLP,
    LearnedPositions,
    VisionSpec,
    WeightNames,
)

NAMES = WeightNames(
    prefixes=("", "model.", "vlm.", "thinker."),
    layer="visual.blocks.{layer}.",
    modules={
        "patch": "visual.patch_embed.proj",
        "positions": "visual.pos_embed",
        "before_mixer": "norm1",
        "qkv": "attn.qkv",
        "out": "attn.proj",
        "before_mlp": "norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "merge_norm": "visual.merger.ln_q",
        "merge_up": "visual.merger.mlp.0",
        "merge_down": "visual.merger.mlp.2",
    },
    ignored=("*.inv_freq", "mtp.*"),
)
GATED_NAMES = NAMES.but(drop=("up",), gate_up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")
EPS = 1e-6
SECTIONS = {
    "glm4v": (8, 12, 12),
    "glm_ocr": (8, 12, 12),
    "qwen3_vl": (24, 20, 20),
    "qwen3_omni": (24, 20, 20),
    "qwen3_5": (11, 11, 10),
}
"""Pairs of each axis where a config names none, by its model type."""


def rotate_rows_and_columns(head_dim: int, theta: float = 10000.0) -> Rope:
    """The first half of a head's pairs turns by the row, the second by the column, each half from the fastest to the slowest."""
    each = head_dim // 4
    exponents = tuple(pair / each for pair in range(each))
    return Rope(theta, head_dim, axes=(0,) * each + (1,) * each, exponents=exponents * 2)


def patches_trunk(
    hf: HFConfig, hidden: int, mlp: FeedForward, norm: Norm, patches: Patches, names: WeightNames, positions: int = 0
) -> DecoderSpec:
    """Layers over patches that turn by row and column."""
    heads, layers = hf.get("num_heads", 16), hf.depth
    head_dim = hidden // heads
    rope = rotate_rows_and_columns(head_dim)
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=layers,
        mixer=Attention(
            heads, hf.get("num_key_value_heads", heads), head_dim, rope, causal=False, qkv_bias=True, out_bias=True
        ),
        mlp=mlp,
        norm=norm,
        weights=names,
        max_positions=max(positions, 1),
        learned_positions=LearnedPositions(positions) if positions else None,
        final_norm=False,
        tied_embeddings=True,
        patches=patches,
    )


def patches_of(hf: HFConfig, **others: object) -> Patches:
    """How `vision_config` says that images are cut."""
    size, frames = hf.get("patch_size", 14), hf.get("temporal_patch_size", 2)
    merge = hf.get("spatial_merge_size", 2)
    fields: dict[str, object] = {"size": size, "frames": frames, "merge": merge, "is_cut": True} | others
    return Patches(channels=hf.get("in_channels", hf.get("in_chans", 3)), **fields)  # type: ignore[arg-type]


def with_axes(spec: DecoderSpec, text: HFConfig) -> DecoderSpec:
    """A language model whose positions have three axes: frames, rows and columns (`mrope_section` pairs of each, one after
    another or, `mrope_interleaved`, in turn)."""
    values = text.to_dict()
    parameters = dict(values.get("rope_parameters") or {}) | dict(values.get("rope_scaling") or {})
    kind = text.get("model_type", "")
    usual = next((each for name, each in SECTIONS.items() if kind.startswith(name)), (16, 24, 24))
    sections = tuple(parameters.get("mrope_section") or usual)
    if parameters.get("mrope_interleaved", False) or kind.startswith("qwen3"):
        axes = [0] * sum(sections)
        for axis in (1, 2):
            axes[axis : sections[axis] * 3 : 3] = [axis] * len(axes[axis : sections[axis] * 3 : 3])
    else:
        axes = [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]
    return with_rope(spec, axes=tuple(axes))


def _merger(hidden: int, merge: int, outputs: int, norm: Norm) -> tuple[Stage, ...]:
    wide = hidden * merge**2
    return (
        Normed("merge_norm", norm),
        Group(merge**2),
        Product("merge_up", wide, act="gelu"),
        Product("merge_down", outputs),
    )


def qwen2_vision(hf: HFConfig) -> VisionSpec:
    """Qwen2-VL."""
    hf = hf.vision_config
    hidden, norm, patches = hf.get("embed_dim", 1280), LayerNorm(EPS), patches_of(hf)
    mlp = MLP(int(hidden * hf.get("mlp_ratio", 4)), act=hf.get("hidden_act", "quick_gelu"), bias=True)
    trunk = patches_trunk(hf, hidden, mlp, norm, patches, NAMES)
    return VisionSpec(trunk, _merger(hidden, patches.merge, hf.hidden_size, norm))


def qwen2_5_vision(hf: HFConfig) -> VisionSpec:
    """Qwen2.5-VL: all layers but a few look within windows. EXAONE 4.5: with fewer heads of keys and values. Qwen2.5-Omni: with
    matrices of queries, keys and values of their own."""
    hf = hf.vision_config
    hidden, norm = hf.hidden_size, RMSNorm(EPS)
    full = hf.get("fullatt_block_indexes", [7, 15, 23, 31])
    window = hf.get("window_size", 112) // hf.get("patch_size", 14)
    patches = patches_of(hf, window=window, windowed=tuple(n for n in range(hf.depth) if n not in full))
    mlp = GatedMLP(hf.intermediate_size, act=hf.get("hidden_act", "silu"), bias=True)
    own = {"qkv": ("attn.q", "attn.k", "attn.v")} if hf.get("model_type", "").startswith("qwen2_5_omni") else {}
    trunk = patches_trunk(hf, hidden, mlp, norm, patches, GATED_NAMES.but((), **own))
    return VisionSpec(trunk, _merger(hidden, patches.merge, hf.get("out_hidden_size", 3584), norm))


def qwen3_vision(hf: HFConfig) -> VisionSpec:
    """Qwen3-VL: learned positions besides, and rows of earlier layers that join behind the decoder's first ones (DeepStack);
    Qwen3.5 without the latter. Qwen3-Omni has other names for what makes embeddings."""
    is_omni, hf = hf.get("model_type", "").startswith("qwen3_omni"), hf.vision_config
    hidden, norm = hf.hidden_size, LayerNorm(EPS)
    patches = patches_of(hf, size=hf.get("patch_size", 16), bias=True, stretch="corners")
    usual = [8, 16, 24] if is_omni or hf.get("model_type", "qwen3_vl").startswith("qwen3_vl") else []
    tapped = tuple(hf.get("deepstack_visual_indexes", usual))
    taps: list[tuple[Stage, ...]] = []
    parts = ("ln_q", "mlp.0", "mlp.2") if is_omni else ("norm", "linear_fc1", "linear_fc2")
    mergers = "visual.merger_list" if is_omni else "visual.deepstack_merger_list"
    modules: dict[str, str] = {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
    roles = ("norm", "up", "down")
    modules |= {f"merge_{role}": f"visual.merger.{part}" for role, part in zip(roles, parts, strict=True)}
    wide, outputs = hidden * patches.merge**2, hf.get("out_hidden_size", 3584)
    for number in range(len(tapped)):
        names = {role: f"tap_{role}_{number}" for role in roles}
        modules |= {names[role]: f"{mergers}.{number}.{part}" for role, part in zip(roles, parts, strict=True)}
        up = Product(names["up"], wide, act="gelu")
        taps.append((Group(patches.merge**2), Normed(names["norm"], norm), up, Product(names["down"], outputs)))
    mlp = MLP(hf.get("intermediate_size", 4304), act=hf.get("hidden_act", "gelu_pytorch_tanh"), bias=True)
    trunk = patches_trunk(
        hf, hidden, mlp, norm, patches, NAMES.but((), **modules), hf.get("num_position_embeddings", 2304)
    )
    trunk = dataclasses.replace(trunk, taps=tapped)
    return VisionSpec(trunk, _merger(hidden, patches.merge, outputs, norm), tuple(taps))


GLM_NAMES = dataclasses.replace(
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
    names = GLM_NAMES.but(("positions", "embedding_norm"), q_norm="attn.q_norm", k_norm="attn.k_norm")
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
    trunk = patches_trunk(hf, hidden, GatedMLP(outputs, act=act), norm, patches, GLM_NAMES, positions)
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


TOWER = "vision_tower."
"""What checkpoints call an encoder."""
NO_TOKENS = 1
"""The vocabulary of an encoder, which has neither tokens nor logits: as small as a spec may say."""
PIXTRAL_NAMES = WeightNames(
    prefixes=("", "model."),
    layer=TOWER + "transformer.layers.{layer}.",
    modules={
        "patch": TOWER + "patch_conv",
        "embedding_norm": TOWER + "ln_pre",
        "before_mixer": "attention_norm",
        "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "out": "attention.o_proj",
        "before_mlp": "ffn_norm",
        "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "down": "feed_forward.down_proj",
        "merge_norm": "multi_modal_projector.norm",
        "merge": "multi_modal_projector.patch_merger.merging_layer",
        "up_projection": "multi_modal_projector.linear_1",
        "down_projection": "multi_modal_projector.linear_2",
    },
)


def pixtral_trunk(hf: HFConfig) -> DecoderSpec:
    """The layers that `vision_config` describes."""
    hidden, heads = hf.get("hidden_size", 1024), hf.get("num_attention_heads", 16)
    head_dim = hf.get("head_dim") or hidden // heads
    parameters = hf.to_dict().get("rope_parameters") or {}
    pairs, norm = head_dim // 4, RMSNorm(1e-5)
    # Even frequencies turn by the row, odd ones by the column.
    exponents = tuple((2 * pair + axis) * 2 / head_dim for axis in (0, 1) for pair in range(pairs))
    rope = Rope(
        float(parameters.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        head_dim,
        axes=(0,) * pairs + (1,) * pairs,
        exponents=exponents,
    )
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 24),
        mixer=Attention(heads, heads, head_dim, rope, causal=False),
        mlp=GatedMLP(hf.get("intermediate_size", 4096), act=hf.get("hidden_act", "gelu")),
        norm=norm,
        weights=PIXTRAL_NAMES,
        max_positions=1,
        embedding_norm=norm,
        final_norm=False,
        tied_embeddings=True,
        patches=Patches(hf.get("patch_size", 16), hf.get("num_channels", 3)),
    )
