"""Families with parts of their own against Transformers in float32: LongCat-Flash, JetMoE, nanochat, MiMo-V2-Flash, Laguna,
Flint, DiffLlama; also over two ranks."""

import json
from typing import Any

import pytest
import torch
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, run_mixed
from tests.oracles.model_driver import ModelDriver, build_tiny

from quire import LLM, SamplingParams
from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry

LONGCAT, JETMOE, DIFFLLAMA = "LongcatFlashForCausalLM", "JetMoeForCausalLM", "DiffLlamaForCausalLM"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longcat": (LONGCAT, {}),
    "longcat: every expert has matrices, stretched, biases": (
        LONGCAT, {"zero_expert_num": 0, "rope_parameters": YARN, "attention_bias": True},
    ),
    "longcat: most experts have none": (LONGCAT, {"n_routed_experts": 2, "zero_expert_num": 6, "moe_topk": 5}),
    "jetmoe": (JETMOE, {}),
    "jetmoe: every expert, an epsilon of the last norm, tied": (
        JETMOE, {"num_experts_per_tok": 5, "rms_norm_eps": 0.05, "tie_word_embeddings": True},
    ),
    "nanochat": ("NanoChatForCausalLM", {}),
    "nanochat: biases, gelu": ("NanoChatForCausalLM", {"attention_bias": True, "hidden_act": "gelu"}),
    "mimo": ("MiMoV2FlashForCausalLM", {}),
    "mimo: values as they are, biases": (
        "MiMoV2FlashForCausalLM", {"attention_value_scale": None, "attention_bias": True, "v_head_dim": 24},
    ),
    "laguna": ("LagunaForCausalLM", {}),
    "laguna: a gate a value, biases": (
        "LagunaForCausalLM", {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.0},
    ),
    "flint": ("FlintForCausalLM", {}),
    "diffllama": (DIFFLLAMA, {}),
    "diffllama: two heads, biases": (
        DIFFLLAMA, {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 0.01},
    ),
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


def test_two_ranks_compute_what_one_computes(tmp_path, restored_choice):
    even = {"n_routed_experts": 4}
    models = {"longcat": (LONGCAT, even), "jetmoe": (JETMOE, {}), "diffllama": (DIFFLLAMA, {})}
    models |= {name: SHAPES[name] for name in ("nanochat", "mimo", "laguna: a gate a value, biases", "flint")}
    models["laguna: a gate a head"] = ("LagunaForCausalLM", {})
    check(2, tmp_path, models, "native")


def test_experts_of_attention_stay_plain_where_other_matrices_become_whole_numbers(tiny):
    settings = {"max_model_len": 64, "skip_tokenizer_init": True, "dtype": "float32", "num_gpu_blocks_override": 40}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1, detokenize=False)
    logprobs: list[list[float]] = []
    for quantization in (None, "int8"):
        with LLM(str(tiny(JETMOE)), quantization=quantization, **settings) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)
            rows = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            logprobs.append([row[token].logprob for row, token in rows])
    assert logprobs[0] != logprobs[1]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=0.1)


def test_heads_that_are_no_pairs_are_refused(tiny):
    config = json.loads((tiny(DIFFLLAMA) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"num_key_value_heads=3 of config.json must be even"):
        ModelRegistry.resolve(DIFFLLAMA).make_spec(
            HFConfig(config | {"num_attention_heads": 6, "num_key_value_heads": 3})
        )
