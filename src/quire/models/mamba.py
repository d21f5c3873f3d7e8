"""Mamba and its hybrids with attention: Mamba 1 and 2, Falcon Mamba, Jamba, Bamba, Falcon-H1, Nemotron-H, Zamba2."""

import dataclasses
import math
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.mixtures import deepseek_mixture
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import Placement, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    GatedMLP,
    Mamba,
    Mamba2,
    Mixer,
    MoE,
    SharedBlock,
    SideBySide,
    WeightNames,
    Zamba,
)

_WITHIN = {
    "ssm_in": "in_proj",
    "ssm_conv": "conv1d.weight",
    "ssm_conv_bias": "conv1d.bias",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_dt_norm": "dt_layernorm.weight",
    "ssm_b_norm": "b_layernorm.weight",
    "ssm_c_norm": "c_layernorm.weight",
    "ssm_a_log": "A_log",
    "ssm_d": "D",
    "ssm_dt_bias": "dt_bias",
    "ssm_norm": "norm.weight",
    "ssm_out": "out_proj",
}

LENGTH = 1 << 20
"""A state has no longest context; configs without attention name none."""


def ssm_names(within: str) -> dict[str, str]:
    """Names of a Mamba or Mamba-2 mixer that a checkpoint has under `within`."""
    return {name: within + source for name, source in _WITHIN.items()}


MAMBA_NAMES = WeightNames(
    modules={
        "embedding": "embeddings",
        "before_mixer": "norm",
        **ssm_names("mixer."),
        "final_norm": "norm_f",
        "lm_head": "lm_head",
    },
    prefixes=("backbone.", "model.", ""),
)


def check_silu(hf: HFConfig, name: str = "hidden_act") -> None:
    """Raises ConfigError where a mixer's activation is not the one that its kernels have."""
    act = hf.get(name, "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"{name}={act!r}: convolutions and gates of state-space layers know silu", setting=name)


def time_step_limits(hf: HFConfig) -> tuple[float, float]:
    """`time_step_limit`; JSON has no infinity, for which some checkpoints write {"__float__": "Infinity"}."""
    low, high = hf.get("time_step_limit") or (0.0, math.inf)

    def number(value: Any) -> float:
        return float(value["__float__"] if is_dict(value) else value)

    return number(low), number(high)


def mamba2_of(hf: HFConfig, **settings: Any) -> Mamba2:
    """The Mamba-2 mixer of hybrids whose configs call its sizes `mamba_*`."""
    check_silu(hf)
    inner = hf.get("mamba_d_ssm") or int(hf.mamba_expand * hf.hidden_size)
    bias = bool(hf.get("mamba_proj_bias", False))
    return Mamba2(
        **{
            "heads": hf.mamba_n_heads,
            "head_dim": inner // hf.mamba_n_heads,
            "groups": hf.get("mamba_n_groups", 1),
            "state": hf.mamba_d_state,
            "conv": hf.get("mamba_d_conv", 4),
            "bias": bias,
            "out_bias": bias,
            "conv_bias": bool(hf.get("mamba_conv_bias", True)),
            "dt_limits": time_step_limits(hf),
            "norm": RMSNorm(hf.rms_norm_eps),
            **settings,
        }
    )


def _spec(hf: HFConfig, mixer: Mixer) -> DecoderSpec:
    check_silu(hf)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=mixer,
        mlp=(None,) * hf.num_hidden_layers,
        norm=RMSNorm(hf.layer_norm_epsilon),
        weights=MAMBA_NAMES,
        max_positions=hf.get("max_position_embeddings", LENGTH),
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


@register("MambaForCausalLM", "FalconMambaForCausalLM")
def mamba(hf: HFConfig) -> DecoderSpec:
    """Mamba; Falcon Mamba norms time steps, B and C, without weights."""
    rank = hf.get("time_step_rank", "auto")
    is_falcon = any(name.startswith("FalconMamba") for name in hf.get("architectures", ()))
    mixer = Mamba(
        channels=hf.get("intermediate_size") or int(hf.get("expand", 2) * hf.hidden_size),
        state=hf.state_size,
        dt_rank=math.ceil(hf.hidden_size / 16) if rank == "auto" else int(rank),
        conv=hf.get("conv_kernel", 4),
        bias=bool(hf.get("use_bias", False)),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        norm=RMSNorm(hf.get("mixer_rms_eps", 1e-6)) if is_falcon else None,
        norm_weights=False,
    )
    return _spec(hf, mixer)


@register("Mamba2ForCausalLM")
def mamba2(hf: HFConfig) -> DecoderSpec:
    """Mamba-2; the norm behind the gate goes over each group by itself."""
    groups, bias = hf.get("n_groups", 8), bool(hf.get("use_bias", False))
    mixer = Mamba2(
        heads=hf.num_heads,
        head_dim=hf.head_dim,
        groups=groups,
        state=hf.state_size,
        conv=hf.get("conv_kernel", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=bool(hf.get("use_conv_bias", True)),
        dt_limits=time_step_limits(hf),
        norm=RMSNorm(hf.layer_norm_epsilon),
        norm_groups=groups,
    )
    return _spec(hf, mixer)


JAMBA_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        (),
        **ssm_names("mamba."),
        before_mlp="pre_ff_layernorm",
        final_norm="final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts_gate_up=("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
        experts_down="feed_forward.experts.{expert}.down_proj",
    ),
    stacked={"experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
)


@register("JambaForCausalLM")
def jamba(hf: HFConfig) -> DecoderSpec:
    """Jamba 1 and 1.5."""
    check_silu(hf)
    spec, layers = llama(hf), range(hf.num_hidden_layers)
    (attention, *_) = spec.attentions()
    rank = hf.get("mamba_dt_rank", "auto")
    mamba = Mamba(
        channels=hf.mamba_expand * hf.hidden_size,
        state=hf.mamba_d_state,
        dt_rank=math.ceil(hf.hidden_size / 16) if rank == "auto" else int(rank),
        conv=hf.get("mamba_d_conv", 4),
        bias=bool(hf.get("mamba_proj_bias", False)),
        conv_bias=bool(hf.get("mamba_conv_bias", True)),
        norm=RMSNorm(hf.rms_norm_eps),
    )
    attention = dataclasses.replace(attention, rope=None)
    dense = GatedMLP(hf.intermediate_size, hf.hidden_act)
    mixture = MoE(
        Routing(hf.num_experts, hf.num_experts_per_tok, renormalize=False), hf.intermediate_size, hf.hidden_act
    )
    has_attention = [layer % hf.attn_layer_period == hf.attn_layer_offset for layer in layers]
    has_experts = [hf.num_experts > 1 and layer % hf.expert_layer_period == hf.expert_layer_offset for layer in layers]
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if yes else mamba for yes in has_attention),
        mlp=tuple(mixture if yes else dense for yes in has_experts),
        weights=JAMBA_NAMES,
    )


BAMBA_NAMES = LLAMA_NAMES.but(
    (),
    **ssm_names("mamba."),
    before_mlp="pre_ff_layernorm",
    final_norm="final_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@register("BambaForCausalLM")
def bamba(hf: HFConfig) -> DecoderSpec:
    """Bamba; half of each head is rotated, unless the config says otherwise."""
    spec = llama(defaults(hf, partial_rotary_factor=0.5))
    (attention, *_), mamba = spec.attentions(), mamba2_of(hf, norm_groups=hf.get("mamba_n_groups", 1))
    chosen = hf.get("attn_layer_indices") or ()
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if layer in chosen else mamba for layer in range(spec.layers)),
        weights=BAMBA_NAMES,
    )


@register("FalconH1ForCausalLM")
def falcon_h1(hf: HFConfig) -> DecoderSpec:
    """Falcon-H1. A multiplier on attention's input multiplies queries, keys and values; the score has two of them."""
    spec, groups = llama(hf), hf.get("mamba_n_groups", 1)
    (attention, *_) = spec.attentions()
    before, gate = float(hf.get("attention_in_multiplier", 1.0)), float((hf.get("mlp_multipliers") or (1.0, 1.0))[0])
    attention = dataclasses.replace(
        attention,
        scale=attention.head_dim**-0.5 * before**2 * float(hf.get("key_multiplier", 1.0)),
        out_scale=before * float(hf.get("attention_out_multiplier", 1.0)),
    )
    mamba = mamba2_of(
        hf,
        norm=RMSNorm(hf.rms_norm_eps) if hf.get("mamba_rms_norm", False) else None,
        norm_groups=groups,
        norm_first=bool(hf.get("mamba_norm_before_gate", True)),
        out_bias=bool(hf.get("projectors_bias", False)),
        scales=tuple(float(hf.get("ssm_in_multiplier", 1.0)) * m for m in hf.get("ssm_multipliers") or (1.0,) * 5),
        out_scale=float(hf.get("ssm_out_multiplier", 1.0)),
    )
    # Biases are not multiplied: the model multiplies inputs, and here outputs are multiplied instead.
    biases = {"qkv": 1 / before, "out": 1 / before, "down": gate, "ssm_in": 1 / float(hf.get("ssm_in_multiplier", 1.0))}
    _, down = hf.get("mlp_multipliers") or (1.0, 1.0)
    return dataclasses.replace(
        spec,
        mixer=(SideBySide((attention, mamba)),) * spec.layers,
        mlp=GatedMLP(
            hf.intermediate_size, hf.hidden_act, bool(hf.get("mlp_bias", False)), scale=gate, out_scale=down / gate
        ),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        logits_scale=float(hf.get("lm_head_multiplier", 1.0)),
        weights=dataclasses.replace(BAMBA_NAMES, bias_scales=biases),
    )


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


_BLOCK = "shared_transformer."
_ADAPTERS = _BLOCK + "feed_forward.gate_up_proj_adapter_list.{index}."
ZAMBA2_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        (),
        **ssm_names("mamba."),
        final_norm="final_layernorm",
        zamba_norm="input_layernorm.weight",
        block_norm=_BLOCK + "input_layernorm.weight",
        block_qkv=tuple(f"{_BLOCK}self_attn.{name}_proj" for name in "qkv"),
        block_out=_BLOCK + "self_attn.o_proj",
        block_mlp_norm=_BLOCK + "pre_ff_layernorm.weight",
        block_gate_up=_BLOCK + "feed_forward.gate_up_proj",
        block_down=_BLOCK + "feed_forward.down_proj",
        block_adapter_in=_ADAPTERS + "0",
        block_adapter_out=_ADAPTERS + "1",
        block_linear="linear",
        **{
            f"block_{name}_adapter_{side}": f"{_BLOCK}self_attn.linear_{name}_adapter_list.{{index}}.{number}"
            for name in "qkv"
            for number, side in enumerate(("in", "out"))
        },
    ),
    ignored=(*LLAMA_NAMES.ignored, "*.shared_transformer.*"),
)
"""Copies of a block in the layers that share it carry nothing to load."""


@register("Zamba2ForCausalLM")
def zamba2(hf: HFConfig) -> DecoderSpec:
    """Zamba2 (1.2B, whose blocks adapt attention too, 2.7B and 7B)."""
    heads, norm = hf.num_attention_heads, RMSNorm(hf.rms_norm_eps)
    head_dim = hf.get("attention_head_dim") or 2 * hf.hidden_size // heads
    groups, bias = hf.get("mamba_ngroups", 1), bool(hf.get("add_bias_linear", False))
    mamba = Mamba2(
        heads=hf.n_mamba_heads,
        head_dim=int(hf.mamba_expand * hf.hidden_size) // hf.n_mamba_heads,
        groups=groups,
        state=hf.mamba_d_state,
        conv=hf.get("mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        dt_limits=(float(hf.get("time_step_min", 0.001)), float("inf")),
        norm=RMSNorm(1e-5),
        norm_groups=groups,
    )
    attention = Attention(
        heads,
        hf.get("num_key_value_heads", heads),
        head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=Rope.from_hf(hf, head_dim) if hf.get("use_mem_rope", False) else None,
    )
    mlp = GatedMLP(hf.get("intermediate_size") or 4 * hf.hidden_size, hf.get("hidden_act", "gelu"), bias)
    shared = [layer for layer, kind in enumerate(hf.layers_block_type) if kind == "hybrid"]
    is_tied = bool(hf.get("tie_word_embeddings", True))
    owners = shared[: hf.get("num_mem_blocks", 1)] if is_tied else shared  # Transformers ties blocks only with the head
    blocks = [
        SharedBlock(
            attention,
            mlp,
            owner=owners[index % len(owners)],
            index=index,
            adapter_rank=hf.get("adapter_rank", 128),
            adapts_attention=bool(hf.get("use_shared_attention_adapter", False)),
        )
        for index in range(len(shared))
    ]
    of_layer = dict(zip(shared, blocks, strict=True))
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(
            Zamba(mamba, norm, of_layer.get(layer), blocks[0] if blocks else None, is_first=layer == 0)
            for layer in range(hf.num_hidden_layers)
        ),
        mlp=(None,) * hf.num_hidden_layers,
        norm=norm,
        weights=ZAMBA2_NAMES,
        max_positions=hf.max_position_embeddings,
        placement=Placement(before_mixer=False),
        tied_embeddings=is_tied,
    )
