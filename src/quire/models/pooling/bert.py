"""Encoders of BERT's kind: every token sees every other, and norms follow the residual sums. BERT and RoBERTa with learned
positions and a plain feed-forward; NomicBERT and GTE with rotary positions and a gated one. ModernBERT, which has norms before
its halves, and windows.

Checkpoints with and without a head name the layers alike, but for the prefix of all names.
"""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import head_dim_of
from quire.models.patterns import kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import RESIDUAL_POST, LayerNorm
from quire.models.rope import Rope, RopeScaling
from quire.models.spec import MLP, Attention, DecoderSpec, GatedMLP, LearnedPositions, WeightNames

BERT_NAMES = WeightNames(
    prefixes=("", "bert.", "roberta.", "model."),
    layer="encoder.layer.{layer}.",
    modules={
        "embedding": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "out": "attention.output.dense",
        "after_mixer": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "after_mlp": "output.LayerNorm",
    },
    ignored=("*embeddings.position_ids", "*embeddings.token_type_ids"),
)
DISTILBERT_NAMES = WeightNames(
    prefixes=("", "distilbert.", "model."),
    layer="transformer.layer.{layer}.",
    modules={
        "embedding": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "out": "attention.out_lin",
        "after_mixer": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "after_mlp": "output_layer_norm",
    },
    ignored=("*embeddings.position_ids",),
)
NOMIC_NAMES = WeightNames(
    prefixes=("", "nomic_bert.", "bert.", "model."),
    layer="encoder.layers.{layer}.",
    modules={
        "embedding": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "emb_ln",
        "qkv": "attn.Wqkv",
        "out": "attn.out_proj",
        "after_mixer": "norm1",
        "gate_up": ("mlp.fc12", "mlp.fc11"),
        "down": "mlp.fc2",
        "after_mlp": "norm2",
    },
)
GTE_NAMES = WeightNames(
    prefixes=("", "new.", "gte.", "model."),
    layer="encoder.layer.{layer}.",
    modules={
        "embedding": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        "qkv": "attention.qkv_proj",
        "out": "attention.o_proj",
        "after_mixer": "attn_ln",
        "gate_up": "mlp.up_gate_proj",
        "down": "mlp.down_proj",
        "after_mlp": "mlp_ln",
    },
    ignored=("*embeddings.position_ids", "*.rotary_emb.inv_freq"),
)


def _bert(hf: HFConfig, positions: LearnedPositions) -> DecoderSpec:
    kind = hf.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type={kind!r} of config.json is not supported; known: absolute", setting="model"
        )
    norm = LayerNorm(hf.get("layer_norm_eps", 1e-12))
    heads, causal = hf.num_attention_heads, bool(hf.get("is_decoder", False))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(heads, heads, hf.hidden_size // heads, causal=causal, qkv_bias=True, out_bias=True),
        mlp=MLP(hf.intermediate_size, act=hf.get("hidden_act", "gelu"), bias=True),
        norm=norm,
        weights=BERT_NAMES,
        max_positions=positions.count,
        placement=RESIDUAL_POST,
        learned_positions=positions,
        token_types=hf.get("type_vocab_size", 2),
        embedding_norm=norm,
        final_norm=False,
    )


@register("BertModel")
def bert(hf: HFConfig) -> DecoderSpec:
    """BERT, and what was trained from it: MiniLM, BGE, E5, GTE's first models."""
    return _bert(hf, LearnedPositions(hf.max_position_embeddings))


@register("RobertaModel", "XLMRobertaModel", "CamembertModel")
def roberta(hf: HFConfig) -> DecoderSpec:
    """RoBERTa and XLM-R (BGE-M3, multilingual E5): the first position is the one after the padding token's id."""
    offset = hf.get("pad_token_id", 1) + 1
    return _bert(hf, LearnedPositions(hf.max_position_embeddings - offset, offset))


@register("DistilBertModel")
def distilbert(hf: HFConfig) -> DecoderSpec:
    """DistilBERT: BERT without segments, under other names."""
    hf = renamed(
        hf,
        hidden_size="dim",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        intermediate_size="hidden_dim",
        hidden_act="activation",
    )
    spec = _bert(hf, LearnedPositions(hf.max_position_embeddings))
    return dataclasses.replace(spec, weights=DISTILBERT_NAMES, token_types=0)


def _rotary(hf: HFConfig, rope: Rope, mlp: GatedMLP, weights: WeightNames, biases: bool) -> DecoderSpec:
    norm, heads = LayerNorm(hf.get("layer_norm_eps", 1e-12)), hf.num_attention_heads
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=Attention(heads, heads, head_dim_of(hf), rope, causal=False, qkv_bias=biases, out_bias=biases),
        mlp=mlp,
        norm=norm,
        weights=weights,
        max_positions=hf.max_position_embeddings,
        placement=RESIDUAL_POST,
        token_types=hf.get("type_vocab_size", 0),
        embedding_norm=norm,
        final_norm=False,
    )


@register("NomicBertModel")
def nomic_bert(hf: HFConfig) -> DecoderSpec:
    """nomic-embed-text v1 and v1.5: rotary positions, SwiGLU, no biases."""
    values = hf.to_dict()
    if values.get("num_experts") or values.get("qkv_proj_bias") or values.get("prenorm"):
        raise ConfigError(
            "NomicBERT with experts, biases or norms before its halves is not supported; known: nomic-embed-text v1 and v1.5",
            setting="model",
        )
    hf = renamed(  # the first checkpoints' names for what Transformers calls otherwise
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        layer_norm_eps="layer_norm_epsilon",
        rope_theta="rotary_emb_base",
    )
    rope = Rope.from_hf(hf, head_dim_of(hf), theta=1000.0)
    return _rotary(
        hf, rope, GatedMLP(hf.intermediate_size, act=hf.get("hidden_act", "silu")), NOMIC_NAMES, biases=False
    )


@register("NewModel", "GteNewModel", "GteModel")
def gte(hf: HFConfig) -> DecoderSpec:
    """GTE's models of version 1.5 and the multilingual ones: rotary positions (perhaps stretched), a gated feed-forward."""
    head_dim = hf.hidden_size // hf.num_attention_heads
    scaling = hf.to_dict().get("rope_scaling") or {}
    if scaling.get("mixed_b") is not None or hf.get("logn_attention_scale", False):
        raise ConfigError("GTE with mixed_b or logn_attention_scale in config.json is not supported", setting="model")
    if scaling.get("type") == "ntk":  # a larger base, and all turn more slowly
        factor = float(scaling["factor"])
        rope = Rope(hf.get("rope_theta", 10000.0) * factor, head_dim, RopeScaling("linear", factor ** (2 / head_dim)))
    else:
        rope = Rope.from_hf(hf, head_dim, theta=160000.0)
    mlp = GatedMLP(hf.intermediate_size, act=hf.get("hidden_act", "gelu"), down_bias=True, up_first=True)
    return _rotary(hf, rope, mlp, GTE_NAMES, biases=True)


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
