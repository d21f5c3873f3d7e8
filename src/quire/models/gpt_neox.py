"""GPT-NeoX, GPT-J and CodeGen: both halves on one residual, partial rotation, layer norms, plain feed-forwards."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.gpt2 import GPT2_NAMES
from quire.models.llama import llama
from quire.models.patterns import defaults, layer_norm_of, renamed, with_layers
from quire.models.registry import register
from quire.models.residual import PARALLEL, PARALLEL_TWO_NORMS, PRE
from quire.models.rope import Rope
from quire.models.spec import MLP, DecoderSpec, WeightNames

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
    spec = gpt_neox(
        defaults(
            hf, intermediate_size=inner, partial_rotary_factor=1.0, attention_bias=False, use_parallel_residual=False,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    mlp = MLP(inner, act=hf.get("hidden_act", "gelu"))
    last = tuple(layer == spec.layers - 1 for layer in range(spec.layers))
    return dataclasses.replace(with_layers(spec, last, out_bias=True), mlp=mlp, weights=JAPANESE_NAMES)


@register("GPTJForCausalLM")
def gptj(hf: HFConfig) -> DecoderSpec:
    """GPT-J: one norm for both halves, interleaved rotation, a bias on the head."""
    hf = renamed(
        hf, hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head", max_position_embeddings="n_positions"
    )  # fmt: skip
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
