"""OPT: learned positions that start at row 2 of their table, LayerNorm before each half, ReLU."""

from quire.config.hf_config import HFConfig
from quire.models.registry import register
from quire.models.residual import PRE, RESIDUAL_POST, LayerNorm
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, WeightNames

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
        "after_mixer": "self_attn_layer_norm",
        "after_mlp": "final_layer_norm",
        "project_in": "project_in",
        "project_out": "project_out",
        "final_norm": "final_layer_norm",
        "lm_head": "lm_head",
    },
)


@register("OPTForCausalLM")
def opt(hf: HFConfig) -> DecoderSpec:
    """OPT; its 350m size norms the residual after each half, and projects embeddings that are narrower than the model."""
    is_pre, width = bool(hf.get("do_layer_norm_before", True)), hf.get("word_embed_proj_dim", hf.hidden_size)
    has_weights = bool(hf.get("layer_norm_elementwise_affine", True))
    heads, bias = hf.num_attention_heads, bool(hf.get("enable_bias", True))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(heads, heads, hf.hidden_size // heads, qkv_bias=bias, out_bias=bias),
        mlp=MLP(hf.ffn_dim, act=hf.activation_function, bias=bias),
        norm=LayerNorm(1e-5, bias=has_weights, weight=has_weights),
        placement=PRE if is_pre else RESIDUAL_POST,
        final_norm=is_pre and not hf.get("_remove_final_layer_norm", False),
        embedding_width=0 if width == hf.hidden_size else width,
        weights=OPT_NAMES,
        max_positions=hf.max_position_embeddings,
        learned_positions=LearnedPositions(hf.max_position_embeddings, POSITION_OFFSET),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )
