"""Llama's plan under other names, or with its matrices put together: InternLM 2, Baichuan, Qwen 1, EXAONE 3,
TeleChat; with layers that differ: DeciLM; or with attention of another kind: nanochat, DiffLlama, JetMoE."""

import dataclasses
import math

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import alibi_slopes, defaults, renamed, residual_placement
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLP, Attention, DecoderSpec, GatedMLP, MoE, WeightNames
from quire.models.variants import DiffAttention, ExpertAttention

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


NANOCHAT_NAMES = LLAMA_NAMES.but(("gate_up", "q_norm", "k_norm"), up="mlp.fc1", down="mlp.fc2")


@register("NanoChatForCausalLM")
def nanochat(hf: HFConfig) -> DecoderSpec:
    """nanochat d20 to d34."""
    spec, norm = llama(hf), RMSNorm(hf.get("rms_norm_eps", 1e-6), weight=False)
    head_dim = spec.attentions()[0].head_dim
    rope = dataclasses.replace(Rope.from_hf(hf, head_dim), backwards=True)
    spec = spec.with_attention(rope=rope, qk_norm=norm, qk_norm_after_rope=True)
    return dataclasses.replace(
        spec,
        mlp=MLP(hf.intermediate_size, hf.get("hidden_act", "relu2")),
        norm=norm,
        embedding_norm=norm,
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        weights=NANOCHAT_NAMES,
    )


DIFFLLAMA_NAMES = LLAMA_NAMES.but(
    (), **{name: f"self_attn.{name}" for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
)


@register("DiffLlamaForCausalLM")
def diffllama(hf: HFConfig) -> DecoderSpec:
    """DiffLlama.

    Raises:
        ConfigError: heads that are no pairs.
    """
    hf = defaults(hf, rms_norm_eps=1e-5)
    spec = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    for name, heads in (("num_attention_heads", hf.num_attention_heads), ("num_key_value_heads", _kv_heads(spec))):
        if heads % 2:
            raise ConfigError(
                f"{name}={heads} of config.json must be even: differential attention takes heads in pairs",
                setting="model",
            )

    def differential(layer: int, attention: Attention) -> DiffAttention:
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        return DiffAttention(**vars(attention), norm=RMSNorm(hf.rms_norm_eps), start=start)

    mixers = tuple(differential(layer, attention) for layer, attention in enumerate(spec.attentions()))
    return dataclasses.replace(spec, mixer=mixers, weights=DIFFLLAMA_NAMES)


def _kv_heads(spec: DecoderSpec) -> int:
    return spec.attentions()[0].kv_heads


JETMOE_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        drop=("qkv", "out", "q_norm", "k_norm", "gate_up", "down"),
        kv="self_attention.kv_proj",
        q_router="self_attention.experts.router.layer",
        out_bias="self_attention.experts.bias",
        router="mlp.router.layer",
        experts_bias="mlp.bias",
    ),
    stacked={
        "q_experts": "self_attention.experts.input_linear.weight",
        "out_experts": "self_attention.experts.output_linear.weight",
        "experts_gate_up": "mlp.input_linear.weight",
        "experts_down": "mlp.output_linear.weight",
    },
)


@register("JetMoeForCausalLM")
def jetmoe(hf: HFConfig) -> DecoderSpec:
    """JetMoE-8B. The config's epsilon is the last norm's; those of layers have one that no config tells."""
    hf = defaults(
        hf,
        vocab_size=32000,
        hidden_size=2048,
        num_hidden_layers=12,
        num_key_value_heads=16,
        kv_channels=128,
        intermediate_size=5632,
        max_position_embeddings=4096,
        activation_function="silu",
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    routing = Routing(hf.num_local_experts, hf.num_experts_per_tok)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=ExpertAttention(
            heads=hf.num_key_value_heads * hf.num_experts_per_tok,
            kv_heads=hf.num_key_value_heads,
            head_dim=hf.kv_channels,
            rope=Rope.from_hf(hf, hf.kv_channels),
            routing=routing,
        ),
        mlp=MoE(routing, hf.intermediate_size, hf.activation_function, out_bias=True),
        norm=RMSNorm(1e-6),
        final_eps=hf.rms_norm_eps,
        weights=JETMOE_NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )
