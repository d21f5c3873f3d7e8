"""LFM2: gated short convolutions with some layers of attention among them; dense, or with mixtures of experts."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.experts import Routing
from quire.models.llama import LLAMA_NAMES, head_dim_of
from quire.models.registry import register
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, RMSNorm, ShortConv

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
        hf.num_experts, hf.num_experts_per_tok, "sigmoid", bool(hf.get("norm_topk_prob", True)),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
    )  # fmt: skip
    mixture = MoE(routing, hf.moe_intermediate_size, "silu", bias_correction=bool(hf.get("use_expert_bias", True)))
    dense = GatedMLP(hf.intermediate_size, "silu")
    mlps = tuple(dense if layer < hf.num_dense_layers else mixture for layer in range(hf.num_hidden_layers))
    return dataclasses.replace(lfm2(hf), mlp=mlps)
