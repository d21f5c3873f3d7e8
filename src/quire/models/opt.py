"""OPT: learned positions that start at row 2 of their table, LayerNorm before each half, ReLU."""

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.registry import register
from quire.models.spec import MLP, Attention, DecoderSpec, LayerNorm, LearnedPositions, WeightNames

POSITION_OFFSET = 2

OPT_NAMES = WeightNames(
    prefixes=("model.decoder.", "decoder.", ""),
    modules={
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
        "before_mixer": "self_attn_layer_norm",
        "before_mlp": "final_layer_norm",
        "final_norm": "final_layer_norm",
        "lm_head": "lm_head",
    },
)


@register("OPTForCausalLM")
def opt(hf: HFConfig) -> DecoderSpec:
    """OPT, but for the 350m size, which norms after each half and projects its embeddings."""
    if not hf.get("do_layer_norm_before", True) or hf.get("word_embed_proj_dim", hf.hidden_size) != hf.hidden_size:
        raise ConfigError("OPT with norms after each half or projected embeddings is not supported", setting="model")
    heads, bias = hf.num_attention_heads, bool(hf.get("enable_bias", True))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(heads, heads, hf.hidden_size // heads, qkv_bias=bias, out_bias=bias),
        mlp=MLP(hf.ffn_dim, act=hf.activation_function, bias=bias),
        norm=LayerNorm(1e-5),
        weights=OPT_NAMES,
        max_positions=hf.max_position_embeddings,
        learned_positions=LearnedPositions(hf.max_position_embeddings, POSITION_OFFSET),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )
