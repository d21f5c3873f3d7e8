"""Nemotron-H: each layer is one of Mamba-2, attention without positions, or a feed-forward, which may have experts."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.mamba import LENGTH, MAMBA_NAMES, check_silu
from quire.models.mixtures import deepseek_mixture
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import MLP, Attention, DecoderSpec, Mamba2, MoE

NEMOTRON_H_NAMES = dataclasses.replace(
    MAMBA_NAMES.but(
        before_mlp="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        router="mixer.gate",
        experts_in="mixer.fc1_latent_proj",
        experts_out="mixer.fc2_latent_proj",
        router_bias="mixer.gate.e_score_correction_bias",
        experts_gate_up="mixer.experts.{expert}.up_proj",
        experts_down="mixer.experts.{expert}.down_proj",
        shared_gate_up="mixer.shared_experts.up_proj",
        shared_down="mixer.shared_experts.down_proj",
    ),
    stacked={"experts_gate_up": "mixer.experts.up_proj", "experts_down": "mixer.experts.down_proj"},
    ignored=(*MAMBA_NAMES.ignored, "mtp.*"),
)
KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
}


@register("NemotronHForCausalLM")
def nemotron_h(hf: HFConfig) -> DecoderSpec:
    """Nemotron-H; time steps have a lower bound only, and the head is always a matrix of its own."""
    check_silu(hf, "mamba_hidden_act")
    pattern = hf.get("hybrid_override_pattern") or hf.get("layers_block_type") or hf.layer_types
    kinds = [KINDS.get(kind, kind) for kind in map(str, pattern)]
    unknown = sorted({*kinds} - {"mamba", "attention", "mlp", "moe"})
    if unknown:
        raise ConfigError(
            f"layers of kind {', '.join(unknown)} are not known in Nemotron-H; known: mamba, attention, mlp, moe",
            setting="model",
        )
    bias = bool(hf.get("use_bias", False))
    mamba = Mamba2(
        heads=hf.mamba_num_heads,
        head_dim=hf.mamba_head_dim,
        groups=hf.n_groups,
        state=hf.ssm_state_size,
        conv=hf.get("conv_kernel", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=bool(hf.get("use_conv_bias", True)),
        dt_limits=(float(hf.get("time_step_min", 0.001)), float("inf")),
        norm=RMSNorm(hf.layer_norm_epsilon),
        norm_groups=hf.n_groups,
    )
    head_dim = hf.get("head_dim") or hf.attention_head_dim
    attention = Attention(hf.num_attention_heads, hf.num_key_value_heads, head_dim)
    mlp = MLP(hf.intermediate_size, hf.get("mlp_hidden_act", "relu2"), bool(hf.get("mlp_bias", False)))
    mixture = _mixture(hf, mlp) if "moe" in kinds else None
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=len(kinds),
        mixer=tuple({"mamba": mamba, "attention": attention}.get(kind) for kind in kinds),
        mlp=tuple({"mlp": mlp, "moe": mixture}.get(kind) for kind in kinds),
        norm=RMSNorm(hf.layer_norm_epsilon),
        weights=NEMOTRON_H_NAMES,
        max_positions=hf.get("max_position_embeddings", LENGTH),
    )


def _mixture(hf: HFConfig, mlp: MLP) -> MoE:
    """DeepSeek-V3's kind of choice among experts without gates."""
    shared = dataclasses.replace(mlp, intermediate=hf.moe_shared_expert_intermediate_size or mlp.intermediate)
    mixture = deepseek_mixture(HFConfig(hf.to_dict() | {"hidden_act": mlp.act}))
    return dataclasses.replace(
        mixture, is_gated=False, shared=shared, latent=hf.get("moe_latent_size", 0), latent_bias=mlp.bias
    )
