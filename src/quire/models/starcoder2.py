"""StarCoder2: rotary positions with LayerNorm, biases and a plain feed-forward."""

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES
from quire.models.registry import register
from quire.models.rope import Rope
from quire.models.spec import MLP, Attention, DecoderSpec, LayerNorm

STARCODER2_NAMES = LLAMA_NAMES.but(drop=("gate_up",), up="mlp.c_fc", down="mlp.c_proj")


@register("Starcoder2ForCausalLM")
def starcoder2(hf: HFConfig) -> DecoderSpec:
    """StarCoder2 in all sizes."""
    head_dim, bias = hf.hidden_size // hf.num_attention_heads, bool(hf.get("use_bias", True))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            rope=Rope.from_hf(hf, head_dim),
            window=hf.get("sliding_window", 0),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MLP(hf.intermediate_size, act=hf.hidden_act, bias=bias),
        norm=LayerNorm(hf.norm_epsilon),
        weights=STARCODER2_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )
