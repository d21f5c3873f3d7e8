"""Llama with attention of another kind: nanochat, DiffLlama, JetMoE."""

import dataclasses
import math

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import MLP, Attention, DecoderSpec, MoE
from quire.models.variants import DiffAttention, ExpertAttention

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
