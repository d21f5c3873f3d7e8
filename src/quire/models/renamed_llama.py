"""Llama's plan under other names, or with its matrices put together: InternLM 2, Baichuan, Qwen 1, EXAONE 3,
TeleChat; or with layers that differ: DeciLM."""

import dataclasses
import math

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import alibi_slopes, defaults, renamed, residual_placement
from quire.models.registry import register
from quire.models.spec import Attention, DecoderSpec, GatedMLP, WeightNames

INTERNLM2_NAMES = WeightNames(
    modules={
        "embedding": "tok_embeddings",
        "qkv": "attention.wqkv",
        "out": "attention.wo",
        "gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "down": "feed_forward.w2",
        "before_mixer": "attention_norm",
        "before_mlp": "ffn_norm",
        "final_norm": "norm",
        "lm_head": "output",
    },
    by_head=("qkv",),
)
QWEN_NAMES = WeightNames(
    modules={
        "embedding": "wte",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "gate_up": ("mlp.w2", "mlp.w1"),
        "down": "mlp.c_proj",
        "before_mixer": "ln_1",
        "before_mlp": "ln_2",
        "final_norm": "ln_f",
        "lm_head": "lm_head",
    },
    prefixes=("transformer.",),
    layer="h.{layer}.",
)
EXAONE_NAMES = QWEN_NAMES.but(
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
)
TELECHAT2_NAMES = dataclasses.replace(
    QWEN_NAMES.but(
        embedding="word_embeddings",
        qkv=("self_attention.query", "self_attention.key_value"),
        out="self_attention.dense",
        gate_up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        before_mixer="input_layernorm",
        before_mlp="post_attention_layernorm",
    ),
    prefixes=("transformer.", ""),
)
BAICHUAN2_VOCABULARY = 125696
"""Baichuan 2 has the config of Baichuan 1 but for its vocabulary, and divides each row of its head by its length."""


@register("InternLM2ForCausalLM")
def internlm2(hf: HFConfig) -> DecoderSpec:
    """InternLM 2 and 2.5: q, k and v stored KV head by KV head."""
    return dataclasses.replace(llama(defaults(hf, attention_bias=bool(hf.get("bias", False)))), weights=INTERNLM2_NAMES)


@register("BaichuanForCausalLM", "BaiChuanForCausalLM")
def baichuan(hf: HFConfig) -> DecoderSpec:
    """Baichuan 1 and 2: 7B rotates, 13B (whose config has only a `model_max_length`) attends by distance."""
    is_13b = "max_position_embeddings" not in hf
    spec = llama(defaults(hf, max_position_embeddings=hf.get("model_max_length", 4096)))
    if is_13b:
        spec = spec.with_attention(rope=None, alibi=alibi_slopes(hf.num_attention_heads))
    return dataclasses.replace(
        spec,
        weights=LLAMA_NAMES.but(qkv="self_attn.W_pack"),
        normalized_head=hf.vocab_size == BAICHUAN2_VOCABULARY,
    )


@register("QWenLMHeadModel")
def qwen1(hf: HFConfig) -> DecoderSpec:
    """Qwen 1; `intermediate_size` counts gate and up together. Its ways of reading beyond the trained length are not used."""
    hf = renamed(hf, rope_theta="rotary_emb_base", rms_norm_eps="layer_norm_epsilon", head_dim="kv_channels")
    half = HFConfig(hf.to_dict() | {"intermediate_size": hf.intermediate_size // 2})
    half = defaults(renamed(half, max_position_embeddings="seq_length"), max_position_embeddings=2048)
    return dataclasses.replace(llama(half).with_attention(qkv_bias=True), weights=QWEN_NAMES)


@register("DeciLMForCausalLM")
def decilm(hf: HFConfig) -> DecoderSpec:
    """DeciLM and Nemotron-NAS: layers differ in their KV heads and widths, and may lack a half."""
    kv_heads = hf.get("num_key_value_heads_per_layer")
    if kv_heads is not None:
        spec = llama(hf)
        (base, *_) = spec.attentions()
        return dataclasses.replace(spec, mixer=tuple(dataclasses.replace(base, kv_heads=count) for count in kv_heads))
    spec = llama(defaults(hf, intermediate_size=0))
    (base, *_), act = spec.attentions(), hf.get("hidden_act", "silu")
    mixers: list[Attention | None] = []
    mlps: list[GatedMLP | None] = []
    for block in hf.block_configs:
        attention, mlp = block["attention"], block["ffn"]
        if attention.get("replace_with_linear") or mlp.get("replace_with_linear"):
            raise ConfigError("replace_with_linear in block_configs of config.json is not supported", setting="model")
        per_group = attention.get("n_heads_in_group") or 1
        mixers.append(None if attention.get("no_op") else dataclasses.replace(base, kv_heads=base.heads // per_group))
        width = (
            mlp.get("intermediate_size") or -(-int(2 * (mlp.get("ffn_mult") or 0) * hf.hidden_size / 3) // 256) * 256
        )
        mlps.append(None if mlp.get("no_op") else GatedMLP(width, act))
    return dataclasses.replace(spec, mixer=tuple(mixers), mlp=tuple(mlps))


@register("ExaoneForCausalLM")
def exaone(hf: HFConfig) -> DecoderSpec:
    """EXAONE 3 and 3.5."""
    hf = renamed(
        hf, num_hidden_layers="num_layers", hidden_act="activation_function", rms_norm_eps="layer_norm_epsilon"
    )
    return dataclasses.replace(llama(hf), weights=EXAONE_NAMES)


@register("TeleChat2ForCausalLM", "TeleChatForCausalLM", "TelechatForCausalLM")
def telechat2(hf: HFConfig) -> DecoderSpec:
    """TeleChat 1 and 2: keys and values stored head by head beside the queries; biases on outputs. The rotation is slowed by
    how often the base length must double to hold the trained one."""
    stretch = 2 ** math.ceil(math.log2(hf.get("training_seqlen", 1) / hf.get("base_seqlen", 1)) + 1) - 1
    if stretch > 1:
        hf = defaults(hf, rope_parameters={"alpha": stretch})
    hf = renamed(
        hf,
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="seq_length",
    )
    spec = llama(hf).with_attention(out_bias=True)
    mlp = GatedMLP(hf.intermediate_size, act="silu", down_bias=True)
    return dataclasses.replace(spec, mlp=mlp, placement=residual_placement(hf), weights=TELECHAT2_NAMES)
