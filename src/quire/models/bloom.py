"""BLOOM, MPT and Falcon: attention by distance (ALiBi), or several queries for one key and value; q, k and v in one matrix."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.gpt2 import GPT2_NAMES
from quire.models.llama import llama
from quire.models.patterns import alibi_slopes, defaults, layer_norm_of, renamed, residual_placement
from quire.models.registry import register
from quire.models.residual import PARALLEL, PARALLEL_TWO_NORMS, PRE
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, WeightNames

BLOOM_NAMES = WeightNames(
    modules={
        "embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "before_mixer": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "final_norm": "ln_f",
        "lm_head": "lm_head",
    },
    prefixes=("transformer.", ""),
    layer="h.{layer}.",
    by_head=("qkv",),
)
MPT_NAMES = dataclasses.replace(
    GPT2_NAMES.but(
        qkv="attn.Wqkv", out="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj", before_mixer="norm_1",
        before_mlp="norm_2", final_norm="norm_f",
    ),
    layer="blocks.{layer}.",
    transposed=(),
)  # fmt: skip


@register("BloomForCausalLM")
def bloom(hf: HFConfig) -> DecoderSpec:
    """BLOOM and BLOOMZ."""
    hf = renamed(hf, hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    hf = defaults(
        hf, attention_bias=True, tie_word_embeddings=True, intermediate_size=4 * hidden,
        max_position_embeddings=hf.get("seq_length", 2048),
    )  # fmt: skip
    return dataclasses.replace(
        llama(hf).with_attention(rope=None, kv_heads=heads, alibi=alibi_slopes(heads)),
        mlp=MLP(4 * hidden, act="gelu_tanh", bias=True),
        norm=layer_norm_of(hf),
        embedding_norm=layer_norm_of(hf),
        placement=residual_placement(hf),
        weights=BLOOM_NAMES,
    )


@register("MptForCausalLM", "MPTForCausalLM")
def mpt(hf: HFConfig) -> DecoderSpec:
    """MPT: no biases; slopes, or a table of positions. Checkpoints of Transformers' own class do not have all of its settings."""
    options, heads, hidden = hf.get("attn_config", HFConfig({})), hf.n_heads, hf.d_model
    if any(name.startswith("Mpt") for name in hf.get("architectures", ())):
        hf = HFConfig(hf.to_dict() | {"expansion_ratio": None, "logit_scale": None})
        options = HFConfig({name: options.get(name) for name in ("clip_qkv", "softmax_scale")})
    if options.get("qk_ln", False) or options.get("prefix_lm", False):
        raise ConfigError(
            "qk_ln and prefix_lm of attn_config in config.json are not supported for MPT", setting="model"
        )
    has_slopes, inner = bool(options.get("alibi", True)), hf.get("expansion_ratio", 4) * hidden
    attention = Attention(
        heads,
        options.get("kv_n_heads", 1 if options.get("attn_type") == "multiquery_attention" else heads),
        hidden // heads,
        clip_qkv=float(options.get("clip_qkv", 0.0)),
        scale=options.get("softmax_scale"),
        alibi=alibi_slopes(heads, float(options.get("alibi_bias_max", 8)), skip_first=True) if has_slopes else (),
    )
    logits = hf.get("logit_scale", 1.0)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hidden,
        layers=hf.n_layers,
        mixer=attention,
        mlp=MLP(inner, act="gelu"),
        norm=layer_norm_of(hf, bias=False),
        weights=MPT_NAMES,
        max_positions=hf.get("max_seq_len", 2048),
        learned_positions=None if has_slopes else LearnedPositions(hf.get("max_seq_len", 2048)),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
        logits_scale=hidden**-0.5 if logits == "inv_sqrt_d_model" else float(logits),
    )


@register("FalconForCausalLM", "RWForCausalLM")
def falcon(hf: HFConfig) -> DecoderSpec:
    """Falcon 7B (one key for all queries, one norm for both halves), 40B and 180B (groups, two norms), RW (slopes)."""
    hf = renamed(
        hf, hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer", num_kv_heads="n_head_kv"
    )
    heads, bias = hf.num_attention_heads, bool(hf.get("bias", False))
    is_new = bool(hf.get("new_decoder_architecture", False))
    is_multi_query = not is_new and bool(hf.get("multi_query", True))
    kv_heads = 1 if is_multi_query else hf.get("num_kv_heads", heads) if is_new else heads
    inner = hf.get("ffn_hidden_size", 4 * hf.hidden_size)
    hf = defaults(
        hf, attention_bias=bias, intermediate_size=inner, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip
    spec, names = llama(hf).with_attention(kv_heads=kv_heads), BLOOM_NAMES.but(drop=("embedding_norm",))
    names = dataclasses.replace(names, by_head=("qkv",) if not is_multi_query else ())
    if hf.get("alibi", False):
        scale = spec.attentions()[0].head_dim ** -0.5
        spec = spec.with_attention(rope=None, alibi=tuple(scale * slope for slope in alibi_slopes(heads)))
    if is_new and hf.get("num_ln_in_parallel_attn", 2) == 2:
        placement, names = PARALLEL_TWO_NORMS, names.but(before_mixer="ln_attn", before_mlp="ln_mlp")
    else:
        placement = PARALLEL if is_new or hf.get("parallel_attn", True) else PRE
    return dataclasses.replace(
        spec,
        mlp=MLP(inner, act=hf.get("activation", "gelu"), bias=bias),
        norm=layer_norm_of(hf),
        placement=placement,
        weights=names,
    )
