"""Llama and its close kin: RMSNorm before each half, rotary positions, gated feed-forward."""

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, RMSNorm, WeightNames

LLAMA_NAMES = WeightNames(
    modules={
        "embedding": "embed_tokens",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
        "before_mixer": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "final_norm": "norm",
        "lm_head": "lm_head",
    }
)


def head_dim_of(hf: HFConfig) -> int:
    """`head_dim`, which need not be hidden_size / heads."""
    return int(hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads)


@register("LlamaForCausalLM", "MistralForCausalLM")
def llama(hf: HFConfig) -> DecoderSpec:
    """Llama 1 to 3, Mistral (with its window where the config has one)."""
    head_dim, bias = head_dim_of(hf), bool(hf.get("attention_bias", False))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.get("num_key_value_heads", hf.num_attention_heads),
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim),
            window=hf.get("sliding_window", 0),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=GatedMLP(hf.intermediate_size, act=hf.hidden_act, bias=bool(hf.get("mlp_bias", False))),
        norm=RMSNorm(hf.rms_norm_eps),
        weights=LLAMA_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )
