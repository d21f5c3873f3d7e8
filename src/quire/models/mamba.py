"""Mamba, Mamba-2 and Falcon Mamba: layers of one mixer and no feed-forward; and what hybrids need of them."""

import math
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, Mamba, Mamba2, Mixer, WeightNames

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
    modules={"embedding": "embeddings", "before_mixer": "norm", **ssm_names("mixer."), "final_norm": "norm_f",
             "lm_head": "lm_head"},
    prefixes=("backbone.", "model.", ""),
)  # fmt: skip


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
