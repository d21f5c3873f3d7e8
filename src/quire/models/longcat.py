"""LongCat-Flash: layers of two halves each with latent attention and a dense feed-forward; experts read beside the first half's
feed-forward and join behind the second's; some experts give what they read."""

import dataclasses
from typing import cast

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.deepseek import latent_decoder
from quire.models.mixtures import EXPERT_NAMES
from quire.models.patterns import defaults, renamed
from quire.models.registry import register
from quire.models.spec import MLA, DecoderSpec, GatedMLP, MoE, WeightNames

DENSE = ("mlps.{sub}.gate_proj", "mlps.{sub}.up_proj")
NAMES = dataclasses.replace(
    EXPERT_NAMES.but(
        drop=("qkv", "q_norm", "k_norm"),
        q_a="self_attn.{sub}.q_a_proj",
        q_a_norm="self_attn.{sub}.q_a_layernorm",
        q_b="self_attn.{sub}.q_b_proj",
        kv_a="self_attn.{sub}.kv_a_proj_with_mqa",
        kv_a_norm="self_attn.{sub}.kv_a_layernorm",
        kv_b="self_attn.{sub}.kv_b_proj",
        out="self_attn.{sub}.o_proj",
        before_mixer="input_layernorm.{sub}",
        before_mlp="post_attention_layernorm.{sub}",
        gate_up=DENSE,
        down="mlps.{sub}.down_proj",
        shared_gate_up=DENSE,
        shared_down="mlps.{sub}.down_proj",
        router="mlp.router.classifier",
        router_bias="mlp.router.e_score_correction_bias",
    ),
    stacked={},
    sublayers=2,
)


@register("LongcatFlashForCausalLM")
def longcat_flash(hf: HFConfig) -> DecoderSpec:
    """LongCat-Flash: the rotation has a base of ten million where its config names none."""
    hf = renamed(
        hf, num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", num_experts_per_tok="moe_topk"
    )
    hf = defaults(hf, hidden_act="silu", zero_expert_num=256, routed_scaling_factor=6.0, rms_norm_eps=1e-5)
    hf = HFConfig(hf.to_dict() | {"num_hidden_layers": 2 * hf.num_hidden_layers, "mlp_bias": False})
    spec = latent_decoder(hf, interleaved=True)
    mla = cast(MLA, spec.mixers_of(0)[0])
    mla = dataclasses.replace(
        mla, q_latent_scale=(hf.hidden_size / mla.q_rank) ** 0.5, kv_latent_scale=(hf.hidden_size / mla.kv_rank) ** 0.5
    )
    dense = GatedMLP(hf.intermediate_size, hf.hidden_act)
    zero = int(hf.zero_expert_num or 0)
    mixture = MoE(
        Routing(
            hf.n_routed_experts + zero, hf.num_experts_per_tok, renormalize=False, scale=float(hf.routed_scaling_factor)
        ),
        hf.expert_ffn_hidden_size,
        hf.hidden_act,
        bias_correction=True,
        shared=dense,
        zero_experts=zero,
        late=True,
    )
    mlps = tuple(dense if layer % 2 else mixture for layer in range(spec.layers))
    return dataclasses.replace(spec, mixer=mla, mlp=mlps, weights=_names(hf.n_routed_experts, zero))


def _names(experts: int, zero: int) -> WeightNames:
    """Guessing layers, a bias that no router adds, and matrices of experts that have none are not read."""
    none = (f"*.mlp.experts.{expert}.*" for expert in range(experts, experts + zero))
    ignored = (*NAMES.ignored, "*mtp.*", "*.classifier.bias", *none)
    return dataclasses.replace(NAMES, ignored=ignored)
