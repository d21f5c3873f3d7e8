"""Sparse latent attention against Transformers in float32: choices of one token to more than there are, shared between layers,
in chunks, over pages of any size, from a shared prefix, and over two ranks."""

import json
from typing import Any

import pytest
import torch
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry

V32, GLM5, HY4 = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v3.2": (V32, {}),
    "deepseek v3.2: one token, stretched, biases": (V32, {"index_topk": 1, "rope_parameters": YARN, "attention_bias": True}),
    "deepseek v3.2: more than any prompt has": (V32, {"index_topk": 200}),
    "deepseek v3.2: more than the context": (V32, {"index_topk": 256, "mlp_layer_types": ["sparse", "dense"] * 2}),
    "glm 5: every second layer takes a choice": (GLM5, {}),
    "glm 5: a list of layers": (GLM5, {"indexer_types": ["full", "shared", "shared", "full"], "index_topk": 5}),
    "hunyuan 4: streams, sinks, gates": (HY4, {}),
    "hunyuan 4: dense attention, a narrow clamp": (HY4, {"index_topk": 256, "swiglu_limit": 0.3, "hc_mult": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_any_page_size_gives_the_same(block_size, reference_kernels, tiny):
    path = tiny(GLM5)
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_a_prefix_that_another_request_computed_may_be_shared(reference_kernels, tiny):
    path = tiny(V32)
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0))
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


def test_index_keys_are_kept_where_a_choice_is_made_and_contexts_are_longer_than_it(reference_kernels, tiny):
    latents = (32 + 8) * 4
    sparse, dense = build_tiny(tiny(GLM5)), build_tiny(tiny(GLM5), max_positions=12)
    assert [spec.bytes_per_token - latents for spec in sparse.kv_cache_specs()] == [64, 64, 0, 64]
    assert [spec.bytes_per_token - latents for spec in dense.kv_cache_specs()] == [0, 0, 0, 0]
    assert (sparse.can_replay, dense.can_replay) == (False, True)


def test_two_ranks_compute_what_one_computes(tmp_path, restored_choice):
    check(2, tmp_path, {"deepseek v3.2": (V32, {}), "glm 5": (GLM5, {}), "hunyuan 4": (HY4, {})}, "native")


@pytest.mark.parametrize(
    "kinds", [["shared", "full", "full", "full"], ["full", "full"], ["full", "some", "full", "full"]]
)
def test_layers_without_a_choice_to_take_are_refused(kinds, tiny):
    config = json.loads((tiny(GLM5) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"indexer_types"):
        ModelRegistry.resolve(GLM5).make_spec(HFConfig(config | {"indexer_types": kinds}))
