"""LFM2 and LFM3: gated short convolutions with some layers of attention among them; dense, or with mixtures of experts."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of
from quire.models.patterns import kinds_of
from quire.models.registry import register
from quire.models.residual import PRE, SANDWICH, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, ShortConv

LFM2_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        before_mixer="operator_norm",
        before_mlp="ffn_norm",
        final_norm="embedding_norm",
        out="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        conv_in="conv.in_proj",
        conv="conv.conv.weight",
        conv_bias="conv.conv.bias",
        conv_out="conv.out_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        router="feed_forward.gate",
        router_bias="feed_forward.expert_bias",
        experts_gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
        experts_down="feed_forward.experts.{expert}.w2",
    ),
    stacked={"experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
)


def _intermediate(hf: HFConfig) -> int:
    size = int(hf.get("block_ff_dim") or hf.intermediate_size)
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(hf.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3)), hf.get("block_multiple_of", 256)
    return -(-size // multiple) * multiple


@register("Lfm2ForCausalLM")
def lfm2(hf: HFConfig) -> DecoderSpec:
    """LFM2 (dense)."""
    head_dim, norm, layers = head_dim_of(hf), RMSNorm(hf.norm_eps), range(hf.num_hidden_layers)
    chosen = hf.get("full_attn_idxs")
    kinds = hf.get("layer_types") or [
        "conv" if chosen and layer not in chosen else "full_attention" for layer in layers
    ]
    attention = Attention(
        hf.num_attention_heads, hf.num_key_value_heads, head_dim, Rope.from_hf(hf, head_dim, theta=1e6), qk_norm=norm
    )
    conv = ShortConv(hf.conv_L_cache, bool(hf.get("conv_bias", False)))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(attention if kind == "full_attention" else conv for kind in kinds),
        mlp=GatedMLP(_intermediate(hf), "silu"),
        norm=norm,
        weights=LFM2_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_embedding", hf.get("tie_word_embeddings", True))),
    )


@register("Lfm2MoeForCausalLM")
def lfm2_moe(hf: HFConfig) -> DecoderSpec:
    """LFM2 whose later layers have experts, chosen by a sigmoid with a learned bias."""
    routing = Routing(
        hf.num_experts,
        hf.num_experts_per_tok,
        "sigmoid",
        bool(hf.get("norm_topk_prob", True)),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
    )
    mixture = MoE(routing, hf.moe_intermediate_size, "silu", bias_correction=bool(hf.get("use_expert_bias", True)))
    dense = GatedMLP(hf.intermediate_size, "silu")
    mlps = tuple(dense if layer < hf.num_dense_layers else mixture for layer in range(hf.num_hidden_layers))
    return dataclasses.replace(lfm2(hf), mlp=mlps)


LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LFM3_NAMES = dataclasses.replace(
    LFM2_NAMES.but(
        out="self_attn.o_proj",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        after_mixer="post_operator_norm",
        after_mlp="post_ffn_norm",
    ),
    unbiased=("self_attn.gate_proj",),
)
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


@register("Lfm3ForCausalLM")
def lfm3(hf: HFConfig) -> DecoderSpec:
    """LFM3: some layers of attention have windows and a rotation of their own; norms around each half, a gate for each head."""
    hf = HFConfig({"sliding_window": 256, "rope_parameters": LFM3_ROPE} | hf.to_dict())
    head_dim, norm, bias = hf.get("head_dim", 128), RMSNorm(hf.norm_eps), bool(hf.get("attention_bias", False))
    is_gated, names = bool(hf.get("use_attention_gate", True)), LFM3_NAMES
    if is_gated:
        names = names.but(qkv=(*LLAMA_QKV, "self_attn.gate_proj"))

    def attention(kind: str) -> Attention:
        window = hf.get("sliding_window", 0) if kind == "sliding_attention" else 0
        return Attention(
            hf.num_attention_heads,
            hf.num_key_value_heads,
            head_dim,
            Rope.from_hf(hf, head_dim, kind),
            window,
            qk_norm=norm,
            qkv_bias=bias,
            out_bias=bias,
            output_gate=is_gated,
            gate_span="head",
        )

    conv = ShortConv(hf.get("conv_L_cache", 7), bool(hf.get("conv_bias", False)))
    spec = lfm2(
        HFConfig(hf.to_dict() | {"conv_L_cache": conv.conv, "block_auto_adjust_ff_dim": False, "rope_parameters": {}})
    )
    return dataclasses.replace(
        spec,
        mixer=tuple(conv if kind == "conv" else attention(kind) for kind in _lfm3_kinds(hf)),
        placement=SANDWICH if hf.get("use_sandwich_norm", True) else PRE,
        weights=names,
    )


def _lfm3_kinds(hf: HFConfig) -> list[str]:
    every = {0: "sliding_attention", 2: "full_attention"}
    return kinds_of(hf, "conv", "sliding_attention", "full_attention") or [
        every.get(layer % 4, "conv") if layer else "conv" for layer in range(hf.num_hidden_layers)
    ]
