"""Molmo 2: Qwen3's or OLMo 3's layers under names of their own, and images whose tokens see one another. Its encoder has rows of
two layers side by side, a few of which become an embedding by attention."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults, renamed, with_layers
from quire.models.registry import register
from quire.models.residual import POST, PRE, LayerNorm, RMSNorm
from quire.models.sight import Gated, Patches, Pooled, Product
from quire.models.spec import MLP, Attention, DecoderSpec, GatedMLP, LearnedPositions, VisionSpec, WeightNames
from quire.models.vision.any_size import NO_TOKENS
from quire.models.vision.clip import up_to_layer

EYE = "vision_backbone.image_vit."
POOL = "vision_backbone.image_pooling_2d."
PROJECTOR = "vision_backbone.image_projector."
EYE_NAMES = WeightNames(
    prefixes=("model.", ""),
    layer=EYE + "transformer.resblocks.{layer}.",
    modules={
        "patch": EYE + "patch_embedding",
        "positions": EYE + "positional_embedding",
        "before_mixer": "attention_norm",
        "qkv": ("attention.wq", "attention.wk", "attention.wv"),
        "out": "attention.wo",
        "before_mlp": "ffn_norm",
        "up": "feed_forward.w1",
        "down": "feed_forward.w2",
        "pool_q": POOL + "wq",
        "pool_kv": (POOL + "wk", POOL + "wv"),
        "pool_out": POOL + "wo",
        "gate_up": (PROJECTOR + "w1", PROJECTOR + "w3"),
        "down_projection": PROJECTOR + "w2",
        "between": "transformer.wte.new_embedding",
    },
    flattened=("patch",),
    bare=("positions",),
)


def _eye_trunk(hf: HFConfig) -> DecoderSpec:
    hidden, heads = hf.get("hidden_size", 1152), hf.get("num_attention_heads", 16)
    size = hf.get("patch_size", hf.get("image_patch_size", 14))
    height, width = hf.get("image_size", hf.get("image_default_input_size")) or (378, 378)
    positions = hf.get("num_position_embeddings", hf.get("image_num_pos")) or (height // size) * (width // size)
    bias, head_dim = bool(hf.get("attention_bias", True)), hf.get("head_dim", 72)
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hidden,
        layers=hf.get("num_hidden_layers", 25),
        mixer=Attention(heads, hf.get("num_key_value_heads", 16), head_dim, causal=False, qkv_bias=bias, out_bias=bias),
        mlp=MLP(hf.get("intermediate_size", 4304), act=hf.get("hidden_act", "gelu_pytorch_tanh"), bias=True),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-6)),
        weights=EYE_NAMES,
        max_positions=positions,
        learned_positions=LearnedPositions(positions),
        final_norm=False,
        tied_embeddings=True,
        patches=Patches(size, hf.get("num_channels", 3), bias=True, channels_last=True),
    )


def molmo2_vision(hf: HFConfig) -> VisionSpec:
    """Molmo 2. All tokens of an image are its embeddings: those of patches are added to that of `image_patch_id`, and the tokens
    between them, which are behind the vocabulary, have their own."""
    trunk, adapter, text = _eye_trunk(hf.vision_config), hf.adapter_config, hf.text_config
    read = adapter.get("vision_feature_layer", adapter.get("vit_layers")) or [24, 18]
    trunk = up_to_layer(trunk, [layer % trunk.layers + 1 for layer in read])
    hidden, wide = adapter.get("hidden_size", 1152), adapter.get("intermediate_size", 18944)
    heads, kv_heads = adapter.get("num_attention_heads", 16), adapter.get("num_key_value_heads", 16)
    pooled = Pooled(heads, kv_heads, adapter.get("head_dim", 72), hidden, bool(adapter.get("attention_bias", True)))
    projector = (
        Product("gate_up", 2 * wide, bias=bool(adapter.get("mlp_bias", False)), parts=2),
        Gated(adapter.get("hidden_act", "silu"), gate_first=True),
        Product("down_projection", adapter.get("text_hidden_size", 3584), bias=False),
    )
    added = hf.get("image_patch_id", 151938) - text.get("vocab_size", 151936)
    rows = text.get("additional_vocab_size", 128)
    return VisionSpec(
        trunk, projector, between=("between",), between_rows=rows, grouped=True, pooled=pooled, added=added
    )


NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        embedding="transformer.wte.embedding",
        qkv="self_attn.att_proj",
        out="self_attn.attn_out",
        gate_up="mlp.ff_proj",
        down="mlp.ff_out",
        before_mixer="attn_norm",
        before_mlp="ff_norm",
        final_norm="transformer.ln_f",
    ),
    layer="transformer.blocks.{layer}.",
    bare=("embedding",),
)
POST_NAMES = NAMES.but(drop=("before_mixer", "before_mlp"), after_mixer="attn_norm", after_mlp="ff_norm")


@register("Molmo2ForConditionalGeneration")
def molmo2(hf: HFConfig) -> DecoderSpec:
    """Molmo 2. The tokens behind its vocabulary stand in images alone."""
    text = renamed(hf.text_config, attention_bias="qkv_bias", rms_norm_eps="layer_norm_eps")
    text = defaults(text, tie_word_embeddings=False)
    norm = RMSNorm(text.get("rms_norm_eps", 1e-6))
    span = "all" if text.get("qk_norm_type", "qwen3") == "olmo" else "head"
    spec = llama(text).with_attention(qk_norm=norm, qk_norm_span=span, out_bias=False)
    mlp = GatedMLP(text.intermediate_size, act=text.get("hidden_act", "silu"), up_first=True)
    scaled = text.get("rope_scaling_layers")
    rope = spec.attentions()[0].rope
    if scaled is not None and rope is not None:
        plain = dataclasses.replace(rope, scaling=None)
        spec = with_layers(spec, tuple(layer not in scaled for layer in range(spec.layers)), rope=plain)
    placement, names = (POST, POST_NAMES) if text.get("norm_after", False) else (PRE, NAMES)
    parts = {"mlp": mlp, "placement": placement, "weights": names, "vision": molmo2_vision(hf)}
    return dataclasses.replace(spec.with_attention(sees_items=True), **parts)
