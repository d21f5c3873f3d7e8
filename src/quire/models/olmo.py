"""EXAONE 4 and OLMo 1 to 3: norms after each half, norms of query and key heads; OLMo Hybrid, mostly of Gated DeltaNet."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.mamba import check_silu
from quire.models.patterns import defaults, full_where_not_sliding, kinds_of
from quire.models.registry import register
from quire.models.residual import POST, PRE, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec, DeltaNet

POST_NAMES = LLAMA_NAMES.but(
    drop=("before_mixer", "before_mlp"), after_mixer="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)


@register("Exaone4ForCausalLM")
def exaone4(hf: HFConfig) -> DecoderSpec:
    """EXAONE 4.0; the small one has no windows, and then every layer rotates."""
    spec = llama(hf)
    qk_norm = RMSNorm(hf.rms_norm_eps)
    full = {"rope": None} if hf.get("sliding_window") else {}
    spec = full_where_not_sliding(spec.with_attention(qk_norm=qk_norm), hf, every=4, **full)
    return dataclasses.replace(spec, placement=POST, weights=POST_NAMES)


@register("OlmoForCausalLM")
def olmo(hf: HFConfig) -> DecoderSpec:
    """OLMo: layer norms with neither weight nor bias; queries, keys and values may be clipped."""
    spec = llama(hf).with_attention(clip_qkv=float(hf.get("clip_qkv", 0.0)))
    return dataclasses.replace(spec, norm=LayerNorm(1e-5, bias=False, weight=False))


@register("Olmo2ForCausalLM")
def olmo2(hf: HFConfig) -> DecoderSpec:
    """OLMo 2."""
    spec = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all")
    return dataclasses.replace(spec, placement=POST, weights=POST_NAMES)


@register("Olmo3ForCausalLM")
def olmo3(hf: HFConfig) -> DecoderSpec:
    """OLMo 3: three layers with a window, then one that sees all; only this one's rotation is stretched."""
    hf = defaults(hf, sliding_window=4096)
    spec = olmo2(hf)
    head_dim = spec.attentions()[0].head_dim
    full, sliding = (Rope.from_hf(hf, head_dim, kind, theta=5e5) for kind in ("full_attention", "sliding_attention"))
    if hf.get("rope_scaling") is not None:
        sliding = dataclasses.replace(sliding, scaling=None)
    return full_where_not_sliding(spec.with_attention(rope=sliding), hf, every=4, rope=full)


OLMO_HYBRID_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        before_mixer="attention_layer_norm",
        before_mlp="feedforward_layer_norm",
        after_mixer="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
        delta_in=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"),
        delta_ba=("linear_attn.b_proj", "linear_attn.a_proj"),
        delta_conv=(
            "linear_attn.q_conv1d.weight",
            "linear_attn.k_conv1d.weight",
            "linear_attn.v_conv1d.weight",
        ),
        delta_a_log="linear_attn.A_log",
        delta_dt_bias="linear_attn.dt_bias",
        delta_norm="linear_attn.o_norm.weight",
        delta_out="linear_attn.o_proj",
    ),
    # Transformers gives the norm behind attention the other norm's name when it saves a checkpoint.
    aliases={"feedforward_layer_norm": "post_attention_layernorm"},
)
OUTPUT_EPSILON = 1e-5
"""Of the norm behind the delta rule, whatever `rms_norm_eps` says."""


@register("OlmoHybridForCausalLM")
def olmo_hybrid(hf: HFConfig) -> DecoderSpec:
    """OLMo Hybrid. A base of rotation that is null means that attention knows no positions."""
    check_silu(hf)
    spec = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all")
    (attention, *_) = spec.attentions()
    if not _rotates(hf):
        attention = dataclasses.replace(attention, rope=None)
    key_heads = hf.get("linear_num_key_heads", hf.num_attention_heads)
    key_dim = hf.get("linear_key_head_dim", int(0.75 * hf.hidden_size / key_heads))
    delta = DeltaNet(
        key_heads=key_heads,
        heads=hf.get("linear_num_value_heads", hf.num_attention_heads),
        key_dim=key_dim,
        head_dim=hf.get("linear_value_head_dim", 2 * key_dim),
        norm=RMSNorm(OUTPUT_EPSILON),
        conv=hf.get("linear_conv_kernel_dim", 4),
        beta_scale=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
    )
    is_full = [kind == "full_attention" for kind in _kinds(hf)]
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if full else delta for full in is_full),
        placement=tuple(POST if full else PRE for full in is_full),
        weights=OLMO_HYBRID_NAMES,
    )


def _kinds(hf: HFConfig) -> list[str]:
    """`layer_types`; without them every fourth layer has attention, or the last one where there are fewer."""
    count = hf.num_hidden_layers
    every = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
    if count < 4:
        every[-1] = "full_attention"
    return kinds_of(hf, "linear_attention", "full_attention") or every


def _rotates(hf: HFConfig) -> bool:
    values = hf.to_dict()
    parameters = values.get("rope_parameters") or {}
    return parameters.get("rope_theta", values.get("rope_theta", 0)) is not None
