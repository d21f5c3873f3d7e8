"""GPT-1 and GPT-2 and what follows their plan, with layer norms and plain feed-forwards: GPT-Neo, StarCoder, GPT-NeoX, GPT-J,
CodeGen, BLOOM, MPT, Falcon, OPT."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import llama
from quire.models.patterns import alibi_slopes, defaults, layer_norm_of, renamed, residual_placement, with_layers
from quire.models.registry import register
from quire.models.residual import PARALLEL, PARALLEL_TWO_NORMS, PRE, RESIDUAL_POST, LayerNorm
from quire.models.rope import Rope
from quire.models.spec import MLP, Attention, DecoderSpec, LearnedPositions, WeightNames

GPT2_NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layer="h.{layer}.",
    modules={
        "embedding": "wte",
        "positions": "wpe",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "before_mixer": "ln_1",
        "before_mlp": "ln_2",
        "final_norm": "ln_f",
        "lm_head": "lm_head",
    },
    transposed=("qkv", "out", "up", "down"),
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
NEO_NAMES = dataclasses.replace(
    GPT2_NAMES.but(
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"), out="attn.attention.out_proj"
    ),
    transposed=(),
    ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
)
GPT1_NAMES = GPT2_NAMES.but(
    drop=("before_mixer", "before_mlp", "final_norm"),
    embedding="tokens_embed",
    positions="positions_embed",
    after_mixer="ln_1",
    after_mlp="ln_2",
)
BIGCODE_NAMES = dataclasses.replace(GPT2_NAMES, transposed=())


@register("GPT2LMHeadModel")
def gpt2(hf: HFConfig) -> DecoderSpec:
    """GPT-2 in all sizes."""
    head_dim = hf.n_embd // hf.n_head
    layers = hf.n_layer
    scale = head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx", False))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.n_embd,
        layers=layers,
        mixer=tuple(
            Attention(
                hf.n_head, hf.n_head, head_dim, qkv_bias=True, out_bias=True, scale=scale / (i + 1 if by_layer else 1)
            )
            for i in range(layers)
        ),
        mlp=MLP(hf.get("n_inner") or 4 * hf.n_embd, act=hf.get("activation_function", "gelu_new"), bias=True),
        norm=layer_norm_of(hf),
        weights=GPT2_NAMES,
        max_positions=hf.n_positions,
        learned_positions=LearnedPositions(hf.n_positions),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


@register("OpenAIGPTLMHeadModel")
def openai_gpt(hf: HFConfig) -> DecoderSpec:
    """GPT-1: norms behind the residual sums, none at the end."""
    act: str = hf.get("afn", "gelu")
    act = {"gelu": "gelu_new", "swish": "silu"}.get(act, act)
    mlp = MLP(4 * hf.n_embd, act=act, bias=True)
    return dataclasses.replace(gpt2(hf), mlp=mlp, placement=RESIDUAL_POST, final_norm=False, weights=GPT1_NAMES)


@register("GPTBigCodeForCausalLM")
def gpt_bigcode(hf: HFConfig) -> DecoderSpec:
    """StarCoder, SantaCoder: GPT-2 with one key and value for all queries."""
    spec = gpt2(hf)
    if hf.get("multi_query", True):
        return dataclasses.replace(spec.with_attention(kv_heads=1), weights=BIGCODE_NAMES)
    return dataclasses.replace(spec, weights=dataclasses.replace(BIGCODE_NAMES, by_head=("qkv",)))


@register("GPTNeoForCausalLM")
def gpt_neo(hf: HFConfig) -> DecoderSpec:
    """GPT-Neo: GPT-2 without a scale of scores and without biases of queries, keys and values; some layers have a window."""
    hf = renamed(hf, n_embd="hidden_size", n_layer="num_layers", n_head="num_heads", n_inner="intermediate_size")
    spec = gpt2(renamed(hf, n_positions="max_position_embeddings"))
    spec = dataclasses.replace(spec.with_attention(scale=1.0, qkv_bias=False), weights=NEO_NAMES)
    groups = hf.get("attention_types", [[["global", "local"], spec.layers // 2]])
    kinds = [kind for names, count in groups for _ in range(count) for kind in names]
    return with_layers(spec, tuple(kind == "local" for kind in kinds), window=hf.get("window_size", 256))


NEOX_NAMES = WeightNames(
    modules={
        "embedding": "embed_in",
        "qkv": "attention.query_key_value",
        "out": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "before_mixer": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
        "final_norm": "final_layer_norm",
        "lm_head": "embed_out",
    },
    prefixes=("gpt_neox.", ""),
    by_head=("qkv",),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.inv_freq"),
)
GPTJ_NAMES = dataclasses.replace(
    GPT2_NAMES.but(
        drop=("positions", "before_mlp"),
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        lm_head_bias="lm_head.bias",
    ),
    transposed=(),
)
JAPANESE_NAMES = dataclasses.replace(
    NEOX_NAMES, prefixes=("gpt_neox_japanese.", ""), aliases={"attention.dense_bias": "attention.dense.bias"}
)
CODEGEN_NAMES = dataclasses.replace(GPTJ_NAMES.but(qkv="attn.qkv_proj"), by_group={"qkv": ((0, 2, 1), 4)})
"""CodeGen was trained on four devices, and each one's queries, values and keys follow one another."""


@register("GPTNeoXForCausalLM")
def gpt_neox(hf: HFConfig) -> DecoderSpec:
    """GPT-NeoX, Pythia, RedPajama, Dolly 2."""
    hf = renamed(hf, rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    spec = llama(defaults(hf, partial_rotary_factor=0.25, attention_bias=True))
    return dataclasses.replace(
        spec.with_attention(kv_heads=hf.num_attention_heads),
        mlp=MLP(hf.intermediate_size, act=hf.get("hidden_act", "gelu"), bias=True),
        norm=layer_norm_of(hf),
        placement=PARALLEL_TWO_NORMS if hf.get("use_parallel_residual", True) else PRE,
        weights=NEOX_NAMES,
    )


@register("GPTNeoXJapaneseForCausalLM")
def gpt_neox_japanese(hf: HFConfig) -> DecoderSpec:
    """GPT-NeoX Japanese: one half after the other, and the only bias is that of the last layer's attention."""
    inner = int(hf.hidden_size * hf.get("intermediate_multiple_size", 4))
    hf = renamed(hf, rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    hf = defaults(hf, partial_rotary_factor=1.0, attention_bias=False, tie_word_embeddings=True)
    spec = gpt_neox(defaults(hf, intermediate_size=inner, use_parallel_residual=False))
    mlp = MLP(inner, act=hf.get("hidden_act", "gelu"))
    last = tuple(layer == spec.layers - 1 for layer in range(spec.layers))
    return dataclasses.replace(with_layers(spec, last, out_bias=True), mlp=mlp, weights=JAPANESE_NAMES)


@register("GPTJForCausalLM")
def gptj(hf: HFConfig) -> DecoderSpec:
    """GPT-J: one norm for both halves, interleaved rotation, a bias on the head."""
    hf = renamed(
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    inner = hf.get("n_inner") or 4 * hf.hidden_size
    spec = llama(defaults(hf, intermediate_size=inner))
    rope = Rope(10000.0, hf.get("rotary_dim") or spec.attentions()[0].head_dim, interleaved=True)
    return dataclasses.replace(
        spec.with_attention(rope=rope, kv_heads=hf.num_attention_heads),
        mlp=MLP(inner, act=hf.get("activation_function", "gelu_new"), bias=True),
        norm=layer_norm_of(hf),
        placement=PARALLEL,
        weights=GPTJ_NAMES,
        lm_head_bias=True,
    )


@register("CodeGenForCausalLM")
def codegen(hf: HFConfig) -> DecoderSpec:
    """CodeGen and CodeGen 2: GPT-J with queries, keys and values in one matrix."""
    return dataclasses.replace(gptj(hf), weights=CODEGEN_NAMES)


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
        qkv="attn.Wqkv",
        out="attn.out_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
        before_mixer="norm_1",
        before_mlp="norm_2",
        final_norm="norm_f",
    ),
    layer="blocks.{layer}.",
    transposed=(),
)


@register("BloomForCausalLM")
def bloom(hf: HFConfig) -> DecoderSpec:
    """BLOOM and BLOOMZ."""
    hf = renamed(hf, hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    hf = defaults(
        hf,
        attention_bias=True,
        tie_word_embeddings=True,
        intermediate_size=4 * hidden,
        max_position_embeddings=hf.get("seq_length", 2048),
    )
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
        hf,
        attention_bias=bias,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
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
