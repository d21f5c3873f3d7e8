"""ModernBERT: norms before each half, rotary positions, gated feed-forwards; most layers see a window."""

from quire.config.hf_config import HFConfig
from quire.models.patterns import kinds_of
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, WeightNames

MODERNBERT_NAMES = WeightNames(
    modules={
        "embedding": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "before_mixer": "attn_norm",
        "qkv": "attn.Wqkv",
        "out": "attn.Wo",
        "before_mlp": "mlp_norm",
        "gate_up": "mlp.Wi",
        "down": "mlp.Wo",
        "final_norm": "final_norm",
    },
)
THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


@register("ModernBertModel")
def modernbert(hf: HFConfig) -> DecoderSpec:
    """ModernBERT: `local_attention` is the whole width of a window, half of it to either side."""
    heads, bias = hf.num_attention_heads, bool(hf.get("attention_bias", False))
    head_dim, every = hf.hidden_size // heads, hf.get("global_attn_every_n_layers", 3)
    kinds = kinds_of(hf, "sliding_attention", "full_attention") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(hf.num_hidden_layers)
    ]
    norm = LayerNorm(hf.get("norm_eps", 1e-5), bias=bool(hf.get("norm_bias", False)))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(
            Attention(
                heads,
                heads,
                head_dim,
                _rope(hf, head_dim, kind),
                window=max(hf.get("local_attention", 128), 1) if kind == "sliding_attention" else 0,
                causal=False,
                qkv_bias=bias,
                out_bias=bias,
            )
            for kind in kinds
        ),
        mlp=GatedMLP(
            hf.intermediate_size, act=hf.get("hidden_activation", "gelu"), bias=bool(hf.get("mlp_bias", False))
        ),
        norm=norm,
        weights=MODERNBERT_NAMES,
        max_positions=hf.max_position_embeddings,
        embedding_norm=norm,
        first_norm=False,
    )


def _rope(hf: HFConfig, head_dim: int, kind: str) -> Rope:
    key, default = THETAS[kind]
    return Rope.from_hf(hf, head_dim, kind, theta=float(hf.get(key, default)))
