"""MiniMax-Text-01 and M1: lightning attention in most layers, softmax attention in some, experts in all; norms stand on the
residual, of which each half keeps a part."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import head_dim_of
from quire.models.mamba import check_silu
from quire.models.mixtral import MIXTRAL_NAMES, mixtral
from quire.models.patterns import defaults, kinds_of, renamed
from quire.models.registry import register
from quire.models.residual import PRE, RESIDUAL_PRE, Joint, RMSNorm
from quire.models.spec import DecoderSpec, Lightning

MINIMAX_NAMES = dataclasses.replace(
    MIXTRAL_NAMES.but(
        lightning_in=("self_attn.qkv_proj", "self_attn.output_gate"),
        lightning_norm="self_attn.norm.weight",
        lightning_out="self_attn.out_proj",
    ),
    ignored=(
        *MIXTRAL_NAMES.ignored, "*.self_attn.slope_rate", "*.self_attn.query_decay", "*.self_attn.key_decay",
        "*.self_attn.diagonal_decay",
    ),
)  # fmt: skip
OUTPUT_EPSILON = 1e-6
"""Of the norm behind lightning attention, whatever `rms_norm_eps` says."""


@register("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
def minimax(hf: HFConfig) -> DecoderSpec:
    """MiniMax-Text-01 and M1, with Transformers' words or with those of their first configs."""
    check_silu(hf)
    hf, placement = _with_transformers_words(hf), RESIDUAL_PRE if hf.get("postnorm", True) else PRE
    if hf.get("shared_intermediate_size"):
        raise ConfigError(
            f"shared_intermediate_size={hf.shared_intermediate_size} of config.json: shared experts are not known of MiniMax; "
            "it must be 0",
            setting="model",
        )
    spec = mixtral(hf)
    (attention, *_) = spec.attentions()
    kinds = kinds_of(hf, "linear_attention", "full_attention") or [
        "linear_attention" if layer % 2 else "full_attention" for layer in range(spec.layers)
    ]
    return dataclasses.replace(
        spec,
        mixer=tuple(
            attention if kind == "full_attention" else _lightning(hf, layer) for layer, kind in enumerate(kinds)
        ),
        placement=placement,
        joints=tuple((_joint(hf, kind.replace("ention", "n")), _joint(hf, "mlp")) for kind in kinds),
        weights=MINIMAX_NAMES,
    )


def _lightning(hf: HFConfig, layer: int) -> Lightning:
    """Heads forget at the rates of ALiBi's slopes, and less in later layers."""
    heads, layers = hf.num_attention_heads, hf.num_hidden_layers
    rate = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    decays = tuple(-rate * 2 ** (-8 * (head + 1) / heads) for head in range(heads))
    return Lightning(heads, head_dim_of(hf), decays, RMSNorm(OUTPUT_EPSILON))


def _joint(hf: HFConfig, half: str) -> Joint:
    return Joint(float(hf.get(f"{half}_alpha_factor", 1)), float(hf.get(f"{half}_beta_factor", 1)))


def _with_transformers_words(hf: HFConfig) -> HFConfig:
    """The first configs list kinds of attention as 0 and 1, and name factors and the rotation's share otherwise."""
    names = {
        f"{half}_{factor}_factor": f"layernorm_{theirs}_{factor}"
        for half, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
        for factor in ("alpha", "beta")
    }
    hf = renamed(hf, **names)
    kinds: list[int] | None = hf.get("attn_type_list")
    if kinds is not None:
        hf = defaults(hf, layer_types=["full_attention" if kind else "linear_attention" for kind in kinds])
    if (
        hf.get("rotary_dim") and hf.architectures[0] != "MiniMaxForCausalLM"
    ):  # whose class in Transformers turns whole heads
        hf = defaults(hf, partial_rotary_factor=hf.rotary_dim / head_dim_of(hf))
    return hf
