"""Gemma 1 to 4 (text): norm weights stored minus one (1 to 3), scaled embeddings, sandwich norms, soft caps; RecurrentGemma."""

import dataclasses
from typing import Any

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of, sliding_layers, with_layers
from quire.models.registry import register
from quire.models.residual import PRE, SANDWICH, LayerInput, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, RgLru, WeightNames
from quire.models.variants import SharedKV

SANDWICH_NAMES = LLAMA_NAMES.but(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@register("GemmaForCausalLM")
def gemma(hf: HFConfig) -> DecoderSpec:
    """Gemma 1; its first configs say "gelu" and mean its tanh form."""
    first = hf.get("hidden_act", "gelu")
    act = hf.get("hidden_activation") or ("gelu_pytorch_tanh" if first == "gelu" else first)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            rope=Rope.from_hf(hf, hf.head_dim, "full_attention"),
            qkv_bias=bool(hf.get("attention_bias", False)),
            out_bias=bool(hf.get("attention_bias", False)),
        ),
        mlp=GatedMLP(hf.intermediate_size, act=act),
        norm=RMSNorm(hf.rms_norm_eps, weight_offset=1.0),
        weights=LLAMA_NAMES,
        max_positions=hf.max_position_embeddings,
        embedding_scale=hf.hidden_size**0.5,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


@register("Gemma2ForCausalLM")
def gemma2(hf: HFConfig) -> DecoderSpec:
    """Gemma 2: every second layer sees a window; soft caps on scores and logits."""
    spec = gemma(defaults(hf, hidden_activation="gelu_pytorch_tanh"))
    spec = spec.with_attention(scale=hf.query_pre_attn_scalar**-0.5, soft_cap=hf.get("attn_logit_softcapping", 0.0))
    return dataclasses.replace(
        full_where_not_sliding(spec, hf, every=2),
        placement=SANDWICH,
        weights=SANDWICH_NAMES,
        logits_soft_cap=hf.get("final_logit_softcapping", 0.0),
    )


@register("VaultGemmaForCausalLM")
def vaultgemma(hf: HFConfig) -> DecoderSpec:
    """VaultGemma: Gemma 2 with norms before each half only."""
    return dataclasses.replace(
        gemma2(hf), placement=PRE, weights=LLAMA_NAMES.but(before_mlp="pre_feedforward_layernorm")
    )


@register("Gemma3ForCausalLM")
def gemma3(hf: HFConfig) -> DecoderSpec:
    """Gemma 3 (text): five windowed layers with their own rotary base, then a full one; norms on query and key heads."""
    hf = defaults(
        hf,
        sliding_window_pattern=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=262208,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        max_position_embeddings=131072,
        sliding_window=4096,
    )
    if "rope_parameters" not in hf:
        hf = defaults(hf, rope_theta=1e6, rope_local_base_freq=1e4)
    spec = gemma2(hf)
    local = Rope.from_hf(hf, hf.head_dim, "sliding_attention")
    if "rope_local_base_freq" in hf:
        local = Rope(theta=float(hf.rope_local_base_freq), rotary_dim=hf.head_dim)
    qk_norm = RMSNorm(hf.rms_norm_eps, weight_offset=1.0)
    spec = spec.with_attention(qk_norm=qk_norm, soft_cap=0.0)  # which Gemma 3 has in its config only
    return with_layers(spec, sliding_layers(hf, every=2), rope=local)


GEMMA4_NAMES = dataclasses.replace(
    SANDWICH_NAMES.but(
        q="self_attn.q_proj",
        qk=("self_attn.q_proj", "self_attn.k_proj"),
        input_embedding="embed_tokens_per_layer",
        input_projection="per_layer_model_projection",
        input_norm="per_layer_projection_norm",
        input_gate="per_layer_input_gate",
        input_out="per_layer_projection",
        after_input="post_per_layer_input_norm",
        layer_scale="layer_scalar",
        router="router.proj",
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
        shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
        shared_down="mlp.down_proj",
        shared_after="post_feedforward_layernorm_1",
        experts_before="pre_feedforward_layernorm_2",
        experts_after="post_feedforward_layernorm_2",
    ),
    stacked={"experts_gate_up": "experts.gate_up_proj", "experts_down": "experts.down_proj"},
)
SLIDING, FULL = "sliding_attention", "full_attention"
ROTATIONS = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@register("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")
def gemma4(hf: HFConfig) -> DecoderSpec:
    """Gemma 4 E2B, E4B, 12B (unified), 26B-A4B and 31B."""
    is_unified = (
        "Gemma4UnifiedForCausalLM" in (hf.get("architectures") or ()) or hf.get("model_type") == "gemma4_unified_text"
    )
    hf = defaults(
        hf,
        vocab_size=262144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        max_position_embeddings=262144 if is_unified else 131072,
        sliding_window=1024 if is_unified else 512,
        tie_word_embeddings=True,
        rope_parameters=ROTATIONS,
    )
    kinds = kinds_of(hf, SLIDING, FULL) or [SLIDING if (n + 1) % 6 else FULL for n in range(hf.num_hidden_layers)]
    kinds = [*kinds[:-1], FULL]
    first_shared = hf.num_hidden_layers - hf.get("num_kv_shared_layers", 0)
    norm = RMSNorm(hf.rms_norm_eps)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(_attention(hf, layer, kinds, first_shared) for layer in range(hf.num_hidden_layers)),
        mlp=tuple(_feed_forward(hf, layer >= first_shared) for layer in range(hf.num_hidden_layers)),
        norm=norm,
        weights=_names(hf, first_shared),
        max_positions=hf.max_position_embeddings,
        placement=SANDWICH,
        embedding_scale=hf.hidden_size**0.5,
        tied_embeddings=bool(hf.tie_word_embeddings),
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        layer_input=None if is_unified else _layer_input(hf, norm),
        layer_scale=True,
    )


def _attention(hf: HFConfig, layer: int, kinds: list[str], first_shared: int) -> Attention:
    kind, own = kinds[layer], _own_values(hf, layer, kinds[layer])
    head_dim, bias = int(own.get("head_dim", hf.head_dim)), bool(hf.get("attention_bias", False))
    norm, is_full = RMSNorm(hf.rms_norm_eps), kind == FULL
    attention = Attention(
        heads=hf.num_attention_heads,
        kv_heads=own.get("num_key_value_heads", hf.num_key_value_heads),
        head_dim=head_dim,
        rope=_rotation(hf, head_dim, kind),
        window=0 if is_full else hf.sliding_window,
        causal=hf.get("use_bidirectional_attention") != "all",
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        scale=1.0,
        v_norm=dataclasses.replace(norm, weight=False),
        k_is_v=is_full and bool(hf.get("attention_k_eq_v", False)),
    )
    if layer < first_shared:
        return attention
    owners = [owner for owner in range(first_shared) if kinds[owner] == kind]
    if not owners:
        raise ConfigError(
            f"num_kv_shared_layers={hf.num_kv_shared_layers} of config.json: layer {layer} ({kind}) shares keys and values, but "
            "no earlier layer of its kind has any",
            setting="model",
        )
    return SharedKV(**vars(attention) | {"v_norm": None, "k_is_v": False}, kv_layer=owners[-1])


def _rotation(hf: HFConfig, head_dim: int, kind: str) -> Rope:
    rope = Rope.from_hf(hf, head_dim, kind)
    return rope if rope.scaling is not None else dataclasses.replace(rope, rotary_dim=head_dim)


def _own_values(hf: HFConfig, layer: int, kind: str) -> dict[str, Any]:
    """What a layer has otherwise than the rest: by its number, or for all layers without a window."""
    by_layer = hf.to_dict().get("per_layer_config")
    if is_dict(by_layer):  # Transformers fills numbers with zeros: "05"
        return dict({int(number): values for number, values in by_layer.items()}.get(layer) or {})
    if kind != FULL:
        return {}
    values = {"head_dim": hf.get("global_head_dim", 512)}
    if hf.get("attention_k_eq_v", False) and hf.get("num_global_key_value_heads"):
        values["num_key_value_heads"] = hf.num_global_key_value_heads
    return values


def _feed_forward(hf: HFConfig, is_shared: bool) -> GatedMLP | MoE:
    wider = 2 if is_shared and hf.get("use_double_wide_mlp", False) else 1
    dense = GatedMLP(hf.intermediate_size * wider, hf.hidden_activation)
    if not hf.get("enable_moe_block", False):
        return dense
    return MoE(
        Routing(hf.num_experts, hf.top_k_experts),
        hf.moe_intermediate_size,
        hf.hidden_activation,
        shared=dense,
        own_norms=RMSNorm(hf.rms_norm_eps),
        expert_scales=True,
    )


def _layer_input(hf: HFConfig, norm: RMSNorm) -> LayerInput | None:
    hf = defaults(hf, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144)
    if not hf.hidden_size_per_layer_input:
        return None
    if hf.vocab_size_per_layer_input < hf.vocab_size:
        raise ConfigError(
            f"vocab_size_per_layer_input={hf.vocab_size_per_layer_input} of config.json must be at least "
            f"vocab_size={hf.vocab_size}: every token has a vector for each layer",
            setting="model",
        )
    sizes = (hf.hidden_size_per_layer_input, hf.vocab_size_per_layer_input)
    return LayerInput(*sizes, hf.hidden_activation, norm, media_id=hf.get("pad_token_id") or 0)


def _names(hf: HFConfig, first_shared: int) -> WeightNames:
    """Layers that read others' keys and values may carry matrices for their own, which nothing uses."""
    unused = [
        f"*layers.{layer}.self_attn.{name}.*"
        for layer in range(first_shared, hf.num_hidden_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return dataclasses.replace(GEMMA4_NAMES, ignored=(*GEMMA4_NAMES.ignored, *unused))


RECURRENT_GEMMA_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        before_mixer="temporal_pre_norm",
        before_mlp="channel_pre_norm",
        final_norm="final_norm",
        gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
        down="mlp_block.down_proj",
        qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
        out="temporal_block.o_proj",
        lru_x="temporal_block.linear_x",
        lru_y="temporal_block.linear_y",
        lru_conv="temporal_block.conv_1d.weight",
        lru_conv_bias="temporal_block.conv_1d.bias",
        lru_input_gate="temporal_block.rg_lru.input_gate_weight",
        lru_input_gate_bias="temporal_block.rg_lru.input_gate_bias",
        lru_forget_gate="temporal_block.rg_lru.recurrent_gate_weight",
        lru_forget_gate_bias="temporal_block.rg_lru.recurrent_gate_bias",
        lru_decay="temporal_block.rg_lru.recurrent_param",
        lru_out="temporal_block.linear_out",
    ),
    flattened=("lru_input_gate", "lru_input_gate_bias", "lru_forget_gate", "lru_forget_gate_bias"),
)
LENGTH = 8192
"""Of the published models' training; their configs name none."""


@register("RecurrentGemmaForCausalLM")
def recurrent_gemma(hf: HFConfig) -> DecoderSpec:
    """RecurrentGemma 2B and 9B."""
    hf = defaults(hf, partial_rotary_factor=0.5)
    heads, layers = hf.num_attention_heads, hf.num_hidden_layers
    head_dim, act = hf.hidden_size // heads, hf.get("hidden_activation", "gelu_pytorch_tanh")
    attention = Attention(
        heads=heads,
        kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=Rope.from_hf(hf, head_dim),
        window=hf.get("attention_window_size", 2048),
        qkv_bias=bool(hf.get("attention_bias", False)),
        out_bias=True,
    )
    block = RgLru(heads, hf.get("lru_width", hf.hidden_size), act, hf.get("conv1d_width", 4))
    kinds = hf.get("block_types", ["recurrent", "recurrent", "attention"])
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=layers,
        mixer=tuple(block if kinds[layer % len(kinds)] == "recurrent" else attention for layer in range(layers)),
        mlp=GatedMLP(hf.intermediate_size // 2, act, bias=True),
        norm=RMSNorm(hf.rms_norm_eps, weight_offset=1.0),
        weights=RECURRENT_GEMMA_NAMES,
        max_positions=hf.get("max_position_embeddings", LENGTH),
        embedding_scale=float(torch.tensor(hf.hidden_size**0.5, dtype=torch.bfloat16)),  # whatever the model's type
        scales_given=True,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
        logits_soft_cap=float(hf.get("logits_soft_cap", 30.0)),
    )
