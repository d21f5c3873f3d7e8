"""Recurrent layers and hybrids against Transformers in float32: the same greedy tokens, and logprobs within 1e-3, however a
step is cut and wherever pages end."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_mixtures import RECURRENT

FILE = "model.safetensors"

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", {}),
    "mamba: biases, width 3, untied": (
        "MambaForCausalLM",
        {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False},
    ),
    "falcon mamba": ("FalconMambaForCausalLM", {}),
    "mamba2": ("Mamba2ForCausalLM", {}),
    "mamba2: one group, bounded time steps, biases": (
        "Mamba2ForCausalLM",
        {"n_groups": 1, "time_step_limit": [0.3, 0.9], "use_bias": True, "num_heads": 16, "head_dim": 8},
    ),
    "jamba": ("JambaForCausalLM", {}),
    "jamba: dense": ("JambaForCausalLM", {"num_experts": 1}),
    "bamba": ("BambaForCausalLM", {}),
    "bamba: four groups, biases": (
        "BambaForCausalLM",
        {"mamba_n_groups": 4, "mamba_proj_bias": True, "attention_bias": True, "attn_layer_indices": [0, 2]},
    ),
    "bamba: whole heads rotate": (
        "BambaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    "falcon h1": ("FalconH1ForCausalLM", {}),
    "falcon h1: norm before the gate": ("FalconH1ForCausalLM", {"mamba_rms_norm": True}),
    "falcon h1: gate before the norm": (
        "FalconH1ForCausalLM",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "falcon h1: biases inside and outside of multipliers": (
        "FalconH1ForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "nemotron h": ("NemotronHForCausalLM", {}),
    "zamba2: two blocks for three layers": ("Zamba2ForCausalLM", {}),
    "zamba2: one block, groups, rotated": (
        "Zamba2ForCausalLM", {"num_mem_blocks": 1, "mamba_ngroups": 2, "use_mem_rope": True, "num_key_value_heads": 4},
    ),
    "zamba2: adapters of attention": (
        "Zamba2ForCausalLM", {"use_shared_attention_adapter": True, "use_mem_rope": True, "num_key_value_heads": 4,
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"]},
    ),
    "zamba2: untied, biases": (
        "Zamba2ForCausalLM", {"tie_word_embeddings": False, "add_bias_linear": True, "adapter_rank": 3},
    ),
    "granite hybrid": ("GraniteMoeHybridForCausalLM", {}),
    "granite hybrid: dense, rotated": (
        "GraniteMoeHybridForCausalLM", {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "lfm2: biases, width 4, untied": ("Lfm2ForCausalLM", {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}),
    "lfm2 moe": ("Lfm2MoeForCausalLM", {}),
    "lfm3": ("Lfm3ForCausalLM", {}),
    "lfm3: biases, no gates, norms before halves alone, untied": (
        "Lfm3ForCausalLM",
        {"attention_bias": True, "conv_bias": True, "use_attention_gate": False, "use_sandwich_norm": False,
         "tie_word_embeddings": False, "conv_L_cache": 3},
    ),
    "lfm3: gates without biases beside queries that have them": ("Lfm3ForCausalLM", {"attention_bias": True}),
    "qwen3 next": ("Qwen3NextForCausalLM", {}),
    "qwen3 next: one value head a key head, a dense layer": (
        "Qwen3NextForCausalLM",
        {"linear_num_value_heads": 2, "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", {}),
    "qwen3.5 moe": (
        "Qwen3_5MoeForCausalLM",
        {**RECURRENT["Qwen3NextForCausalLM"], "linear_num_value_heads": 6, "shared_expert_intermediate_size": 24},
    ),
    "kimi linear": ("KimiLinearForCausalLM", {}),
    "kimi linear: one head, width 3, all dense": (
        "KimiLinearForCausalLM",
        {"linear_num_heads": 1, "linear_head_dim": 40, "linear_conv_kernel_dim": 3, "mlp_layer_types": ["dense"] * 4},
    ),
    "bailing hybrid": ("BailingHybridForCausalLM", {}),
    "bailing hybrid: decays without a floor": (
        "BailingHybridForCausalLM", {"kda_safe_gate": False, "short_conv_kernel_size": 3, "mlp_layer_types": ["dense"] * 4},
    ),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax: plain sums, a window, tied": (
        "MiniMaxForCausalLM",
        {"linear_attn_alpha_factor": 1, "linear_attn_beta_factor": 1, "full_attn_alpha_factor": 1, "mlp_alpha_factor": 1,
         "full_attn_beta_factor": 1, "mlp_beta_factor": 1, "sliding_window": 9, "tie_word_embeddings": True},
    ),
    "recurrent gemma": ("RecurrentGemmaForCausalLM", {}),
    "recurrent gemma: width 3, biases, untied": (
        "RecurrentGemmaForCausalLM",
        {"conv1d_width": 3, "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1, "lru_width": None},
    ),
    "rwkv": ("RwkvForCausalLM", {}),
    "rwkv: never rescaled, another epsilon": ("RwkvForCausalLM", {"rescale_every": 0, "layer_norm_epsilon": 1e-2}),
    "olmo hybrid": ("OlmoHybridForCausalLM", {}),
    "olmo hybrid: no positions, no negative eigenvalues, tied": (
        "OlmoHybridForCausalLM",
        {"rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False, "tie_word_embeddings": True,
         "attention_bias": True, "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    driver = ModelDriver(build_tiny(path))
    for token_ids, logprobs in run_mixed(driver, seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize("name", ["mamba", "falcon h1", "lfm2", "qwen3 next"])
def test_any_page_size_gives_the_same(name, block_size, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=24)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mamba", "bamba", "lfm2", "qwen3 next"])
def test_a_prefix_that_another_request_computed_may_be_shared_at_a_page_border(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0), chunk=20)
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


def test_the_text_part_of_qwen3_5_is_read_from_a_checkpoint_that_sees(reference_kernels, tiny, tmp_path):
    path, (*_, token_ids) = tiny("Qwen3_5ForCausalLM"), prompts()
    config = json.loads((path / "config.json").read_bytes())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value for name, value in load_file(path / FILE).items()
    }
    save_file(tensors | {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2)}, tmp_path / FILE)
    logprobs = ModelDriver(build_tiny(tmp_path)).prefill(Sequence(token_ids, row=0), chunk=30)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_olmo_hybrids_convolutions_have_the_sizes_of_queries_keys_and_values(reference_kernels, tiny, tmp_path):
    """As published; Transformers reads them, but saves them in three equal parts."""
    path = tiny("OlmoHybridForCausalLM", linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=10)
    tensors = load_file(path / FILE)
    names = [name for name in tensors if "q_conv1d" in name]
    for name in names:
        parts = [name.replace("q_conv", f"{part}_conv") for part in "qkv"]
        whole = torch.cat([tensors[part] for part in parts])
        for part, conv in zip(parts, whole.split((16, 16, 40)), strict=True):
            tensors[part] = conv.clone()
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(tmp_path)).prefill(Sequence(token_ids, row=0), chunk=30)
    assert len(names) == 3
    torch.testing.assert_close(logprobs, oracle_logprobs(tmp_path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
def test_the_class_of_the_text_reads_a_config_that_nests_it(name, reference_kernels, tiny, tmp_path):
    """As Transformers' class of the text alone takes it from a model that also sees."""
    architecture, overrides = SHAPES[name]
    path, (*_, token_ids) = tiny(architecture, **overrides), prompts()
    config = json.loads((path / "config.json").read_bytes())
    whole = {"architectures": [architecture], "model_type": "qwen3_5", "vision_config": {"hidden_size": 8}}
    whole |= {"tie_word_embeddings": config.pop("tie_word_embeddings"), "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / FILE)
    for number, prefix in enumerate(("model.language_model.", "model.")):
        named = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
        save_file(named | {"model.visual.merger.norm.weight": torch.zeros(2)}, tmp_path / FILE)
        logprobs = ModelDriver(build_tiny(tmp_path)).prefill(Sequence(token_ids, row=number), chunk=30)
        torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2"])
def test_bfloat16_stays_close_to_float32(name, kernels, tiny):
    """Weights in 16 bits; states, and the oracle, in float32."""
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, dtype="bfloat16", **overrides)
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(path, dtype="bfloat16")).prefill(Sequence(token_ids, row=0), chunk=16)
    error = (logprobs - oracle_logprobs(path, tuple(token_ids))).abs()
    assert error.max() < 0.5
    assert error.mean() < 0.05
