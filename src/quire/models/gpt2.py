"""GPT-1, GPT-2 and GPT-Neo: LayerNorm, learned positions; 1 and 2 have one fused qkv and matrices stored [in, out]."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.patterns import layer_norm_of, renamed, with_layers
from quire.models.registry import register
from quire.models.residual import RESIDUAL_POST
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
    spec = gpt2(
        renamed(
            hf, n_embd="hidden_size", n_layer="num_layers", n_head="num_heads", n_positions="max_position_embeddings",
            n_inner="intermediate_size",
        )
    )  # fmt: skip
    spec = dataclasses.replace(spec.with_attention(scale=1.0, qkv_bias=False), weights=NEO_NAMES)
    groups = hf.get("attention_types", [[["global", "local"], spec.layers // 2]])
    kinds = [kind for names, count in groups for _ in range(count) for kind in names]
    return with_layers(spec, tuple(kind == "local" for kind in kinds), window=hf.get("window_size", 256))
