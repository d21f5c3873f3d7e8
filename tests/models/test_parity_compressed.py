"""DeepSeek-V4 against Transformers in float32: windows that close in one step or over many, on pages shorter and longer than
them, from a shared prefix, over two ranks; and what its pages keep."""

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

NAME = "DeepseekV4ForCausalLM"
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "all compressed tokens, stretched, sigmoid scores": {"index_topk": 100, "rope_parameters": YARN, "scoring_func": "sigmoid"},
    "one compressed token, no mixing of streams to speak of": {"index_topk": 1, "hc_mult": 1, "hc_sinkhorn_iters": 1},
    "odd rates, biases of the shared feed-forward": {
        "compress_rates": {SPARSE: 5, HEAVY: 7}, "mlp_bias": True, "num_hash_layers": 4, "sliding_window": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    path = tiny(NAME, **SHAPES[name])
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
def test_any_page_size_gives_the_same(block_size, reference_kernels, tiny):
    path = tiny(NAME)
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_a_prefix_that_another_request_computed_may_be_shared(reference_kernels, tiny):
    path = tiny(NAME)
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0))
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


def test_rows_are_kept_for_a_window_and_compressed_tokens_for_ever(reference_kernels, tiny):
    specs = build_tiny(tiny(NAME)).kv_cache_specs()
    rows = {32 + 2 * 32: 10, 32 + 4 * 32 + 4 * 16: 10, 32: 10}
    assert {spec.bytes_per_token // 4: spec.window for spec in specs if spec.kind == "sliding_window"} == rows
    compressed = [spec.bytes_per_token // 4 for spec in specs if spec.kind == "mla"]
    assert compressed == [32 // 8, (32 + 16) // 4, (32 + 16) // 4]


def test_two_ranks_compute_what_one_computes(tmp_path, restored_choice):
    check(2, tmp_path, {"deepseek v4": (NAME, {})}, "native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' of config.json must be 'silu'"),
        ({"scoring_func": "gelu"}, "scoring_func='gelu' of config.json must be sqrtsoftplus, sigmoid or softmax"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 of config.json must be 1"),
        ({"layer_types": None, "compress_ratios": [0, 4, 128, 16]}, "compress_ratios of config.json has 16"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(changes, message, tiny):
    config = json.loads((tiny(NAME) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        ModelRegistry.resolve(NAME).make_spec(HFConfig(config | changes))
