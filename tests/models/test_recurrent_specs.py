"""Specs of recurrent models from configs as published checkpoints write them."""

import math
from typing import Any

import pytest

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry
from quire.models.residual import PRE, RESIDUAL_PRE, Joint
from quire.models.spec import MLA, MLP, Attention, DecoderSpec, DeltaNet, KimiDelta, Mamba2, ShortConv

SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_expand": 2}


def spec_of(architecture: str, **config: Any) -> DecoderSpec:
    hf = HFConfig(SIZES | config | {"architectures": [architecture]})
    return ModelRegistry.resolve(hf.architectures).make_spec(hf)


def kinds(spec: DecoderSpec) -> list[str]:
    return [type(mixer).__name__ for layer in range(spec.layers) for mixer in spec.mixers_of(layer)]


def test_nemotron_h_reads_its_pattern_and_older_names():
    spec = spec_of(
        "NemotronHForCausalLM", hybrid_override_pattern="M-*M", attention_head_dim=32, mamba_num_heads=8, mamba_head_dim=16,
        n_groups=2, ssm_state_size=16, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    assert kinds(spec) == ["Mamba2", "Attention", "Mamba2"]
    assert isinstance(spec.mlps()[1], MLP) and spec.mlps()[0] is None
    (attention,) = spec.mixers_of(2)
    assert isinstance(attention, Attention) and attention.head_dim == 32 and attention.rope is None


def test_nemotron_h_with_layers_of_another_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match="layers of kind X are not known in Nemotron-H"):
        spec_of("NemotronHForCausalLM", hybrid_override_pattern="MX*E", layer_norm_epsilon=1e-5)


def test_granite_4_calls_its_layers_mamba_and_attention():
    spec = spec_of(
        "GraniteMoeHybridForCausalLM", **MAMBA2, layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=0,
        position_embedding_type="nope", shared_intermediate_size=48,
    )  # fmt: skip
    assert kinds(spec) == ["Mamba2", "Attention", "Mamba2", "Mamba2"]
    (attention,) = spec.mixers_of(1)
    assert isinstance(attention, Attention) and attention.rope is None


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, "inf"], None])
def test_a_limit_of_time_steps_may_be_infinite_in_any_way(limit):
    spec = spec_of("BambaForCausalLM", **MAMBA2, attn_layer_indices=[1], time_step_limit=limit)
    (mixer,) = spec.mixers_of(0)
    assert isinstance(mixer, Mamba2) and mixer.dt_limits == (0.0, math.inf) and mixer.head_dim == 16


def test_lfm2_reads_indices_of_attention_and_its_own_names():
    spec = spec_of(
        "Lfm2ForCausalLM", full_attn_idxs=[2], conv_L_cache=3, norm_eps=1e-5, block_ff_dim=96, block_multiple_of=32,
        tie_embedding=False,
    )  # fmt: skip
    assert kinds(spec) == ["ShortConv", "ShortConv", "Attention", "ShortConv"]
    assert spec.mixers_of(0) == (ShortConv(3),)
    assert spec.mlps()[0].intermediate == 64  # two thirds of 96
    assert not spec.tied_embeddings


def test_qwen3_next_without_layer_types_attends_in_every_fourth_layer():
    spec = spec_of(
        "Qwen3NextForCausalLM", head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, partial_rotary_factor=0.5,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    assert kinds(spec) == ["DeltaNet", "DeltaNet", "DeltaNet", "Attention"]
    (delta,), (attention,) = spec.mixers_of(0), spec.mixers_of(3)
    assert isinstance(delta, DeltaNet) and (delta.key_heads, delta.heads) == (2, 4)
    assert isinstance(attention, Attention) and attention.rope is not None and attention.rope.rotary_dim == 8
    assert attention.output_gate


KIMI_LINEAR = {
    "model_max_length": 4096, "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1, "moe_renormalize": True,
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.4, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True, "head_dim": 24, "rope_scaling": None,
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 12, "num_heads": 6, "short_conv_kernel_size": 3,
    },
}  # fmt: skip


def test_kimi_linear_reads_its_linear_attn_config_as_transformers_does():
    from transformers import KimiLinearConfig

    spec = spec_of("KimiLinearForCausalLM", **KIMI_LINEAR)
    assert kinds(spec) == ["KimiDelta", "MLA", "KimiDelta", "KimiDelta"]
    (delta,), (latent,) = spec.mixers_of(0), spec.mixers_of(1)
    assert isinstance(delta, KimiDelta) and (delta.heads, delta.head_dim, delta.conv, delta.decay_rank) == (
        6,
        12,
        3,
        12,
    )
    assert isinstance(latent, MLA) and (latent.rope.table(8)[:, :4] == 1).all()
    assert spec == spec_of("KimiLinearForCausalLM", **KimiLinearConfig(**(SIZES | KIMI_LINEAR)).to_dict())


def test_kimi_linear_with_positions_in_latent_attention_is_refused():
    with pytest.raises(ConfigError, match="mla_use_nope=False of config"):
        spec_of("KimiLinearForCausalLM", **KIMI_LINEAR | {"mla_use_nope": False})


LING_3 = {
    "num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "head_dim": 16,
    "moe_intermediate_size": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "layer_group_size": 2, "rope_theta": 6e6, "rope_scaling": None, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_ling_3_has_latent_attention_at_the_end_of_each_group():
    spec = spec_of("BailingMoeV3ForCausalLM", **LING_3)
    assert kinds(spec) == ["KimiDelta", "MLA", "KimiDelta", "MLA"]
    (delta,), (latent,) = spec.mixers_of(0), spec.mixers_of(1)
    assert isinstance(delta, KimiDelta) and (delta.heads, delta.head_dim, delta.floor) == (4, 16, -5.0)
    assert isinstance(latent, MLA) and latent.head_gate and latent.rope.theta == 6e6
    assert "*layers.4.*" in spec.weights.ignored


def test_queries_of_ling_3_may_have_a_rank_of_their_own():
    (latent,) = spec_of("BailingMoeV3ForCausalLM", **LING_3 | {"q_lora_rank": 12}).mixers_of(1)
    assert isinstance(latent, MLA) and latent.q_rank == 12


@pytest.mark.parametrize("name", ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"])
def test_what_ling_3_has_only_elsewhere_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}=.* is not known of Ling 3"):
        spec_of("BailingHybridForCausalLM", **LING_3 | {name: [0, 0, 7.0, 0]})


MINIMAX_TEXT_01 = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16, "attn_type_list": [0, 1, 0, 0],
    "layernorm_full_attention_alpha": 3.5, "layernorm_linear_attention_alpha": 3.0, "layernorm_linear_attention_beta": 0.5,
    "layernorm_mlp_alpha": 2.0, "postnorm": True, "shared_intermediate_size": 0, "rope_theta": 1e7, "sliding_window": None,
}  # fmt: skip


def test_minimax_reads_the_words_of_its_first_configs():
    spec = spec_of("MiniMaxText01ForCausalLM", **MINIMAX_TEXT_01)
    assert kinds(spec) == ["Lightning", "Attention", "Lightning", "Lightning"]
    (attention,) = spec.mixers_of(1)
    assert isinstance(attention, Attention) and attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (16, 1e7)
    assert spec.joints[0] == (Joint(3.0, 0.5), Joint(2.0)) and spec.joints[1] == (Joint(3.5), Joint(2.0))
    assert spec.placements()[0] == RESIDUAL_PRE
    assert spec_of("MiniMaxM1ForCausalLM", **MINIMAX_TEXT_01 | {"postnorm": False}).placements()[0] == PRE


def test_minimax_with_shared_experts_is_refused():
    with pytest.raises(ConfigError, match="shared_intermediate_size=64"):
        spec_of("MiniMaxText01ForCausalLM", **MINIMAX_TEXT_01 | {"shared_intermediate_size": 64})


def test_another_activation_than_the_kernels_is_refused():
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        spec_of("BambaForCausalLM", **MAMBA2, hidden_act="gelu")
