"""Gemma 4 against Transformers in float32: heads by kind of layer, values that are keys, shared keys and values, vectors of
tokens for each layer, experts beside a dense feed-forward; over two ranks, and replayed."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.cpu import recording
from quire.models.registry import ModelRegistry
from quire.platforms.cpu import CpuPlatform

NAME = "Gemma4ForCausalLM"
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "shared keys and values, wide feed-forwards, layer inputs": (NAME, {}),
    "no layer inputs, nothing shared": (NAME, {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    "values are keys, biases, untied": (
        NAME,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "experts": (NAME, EXPERTS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    "experts, shared keys and values, layer inputs": (NAME, EXPERTS | {"hidden_activation": "silu"}),
    "unified": ("Gemma4UnifiedForCausalLM", {}),
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


def test_layers_that_share_keep_nothing(reference_kernels, tiny):
    specs = build_tiny(tiny(NAME)).kv_cache_specs()
    assert [(spec.kind, spec.head_dim) for spec in specs] == [("sliding_window", 16), ("full", 24)]


def test_two_ranks_compute_what_one_computes(tmp_path, restored_choice):
    experts = SHAPES["experts, shared keys and values, layer inputs"][1] | {"num_experts": 4}
    models = {
        "shared": (NAME, {}),
        "values are keys, one head for both ranks": SHAPES["values are keys, biases, untied"],
        "experts": (NAME, experts),
    }
    check(2, tmp_path, models, "native")


def test_a_step_is_recorded_once_and_replayed(tiny, restored_choice, monkeypatch):
    CpuPlatform().select_kernels()
    if ops.choices()["paged_attention"].chosen.platform != "cpu":
        pytest.skip("the native kernels are not built here")
    path = tiny(NAME)
    driver = ModelDriver(build_tiny(path))
    (*_, token_ids) = prompts()
    driver.prefill(Sequence(token_ids[:20], row=1))
    step = driver.step_inputs
    step.num_tokens = 20
    recorded = recording.record(lambda: driver.model.forward(step), 20, 1, runs=False)
    assert recorded is not None
    monkeypatch.setattr(driver.model, "forward", lambda step: recorded.replay(step.num_tokens, 0))
    logprobs = driver.prefill(Sequence(token_ids, row=2), chunk=13)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_the_text_of_a_checkpoint_that_also_sees_is_read(reference_kernels, tmp_path):
    path = make_tiny_model(NAME, tmp_path, tokenizer=False)
    expected = ModelDriver(build_tiny(path)).prefill(Sequence([5, 6, 7, 8, 9], row=0))
    config = json.loads((path / "config.json").read_bytes())
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": config, "model_type": "gemma4"}
    (path / "config.json").write_text(json.dumps(whole))
    weights = load_file(path / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    others = (
        "vision_tower.patch.weight",
        "embed_vision.projection.weight",
        "audio_tower.conv.weight",
        "embed_audio.x.weight",
    )
    save_file(renamed | {f"model.{name}": torch.ones(2, 2) for name in others}, path / "model.safetensors")
    assert torch.equal(ModelDriver(build_tiny(path)).prefill(Sequence([5, 6, 7, 8, 9], row=0)), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input=100 of config.json must be at least"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 of config.json: layer 1 .full_attention. shares"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(changes, message, tiny):
    config = json.loads((tiny(NAME) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        ModelRegistry.resolve(NAME).make_spec(HFConfig(config | changes))
