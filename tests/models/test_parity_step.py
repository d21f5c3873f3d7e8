"""Step-3.5 and 3.7 (text) against Transformers in float32: heads and rotations by kind of layer, limits of what activations give,
the names of published checkpoints."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import randomize, tiny_values

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry
from quire.models.window_moe import before_silu

NAME = "Step3p7ForConditionalGeneration"
TEXT = tiny_values("Step3p5ForCausalLM")
LIMITS = {"swiglu_limits": [0, 0.5, None, 0.2], "swiglu_limits_shared": [0.3, 0, 0.4, 0]}
SHAPES: dict[str, dict[str, Any]] = {
    "no limits": {},
    "limits": LIMITS,
    "biases, another scale, all heads alike": {
        "attention_bias": True, "mlp_bias": True, "query_pre_attn_scalar": 30, "num_sliding_attention_heads": None,
    },
    "published fields": {
        "rope_parameters": None, "rope_theta": [1e6, 1e4, 1e4, 1e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "mlp_layer_types": None, "moe_layers_enum": "2,3",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A tiny checkpoint of a shape, with images' part."""

    @functools.cache
    def make(name: str) -> Path:
        from transformers import Step3p7Config, Step3p7ForConditionalGeneration

        path = tmp_path_factory.mktemp("step")
        eyes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = Step3p7Config(text_config=TEXT | SHAPES[name], vision_config=eyes)
        model = Step3p7ForConditionalGeneration(config).eval()
        randomize(model, seed=0)
        model.save_pretrained(path)
        return path

    return make


def assert_parity(path: Path, oracle: Path, seed: int) -> None:
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=seed):
        expected = oracle_logprobs(oracle, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, step):
    assert_parity(step(name), step(name), seed=len(name))


def test_limits_change_what_the_model_gives(reference_kernels, step):
    (*_, token_ids) = prompts()
    first, second = (oracle_logprobs(step(name), tuple(token_ids)) for name in ("no limits", "limits"))
    assert (first - second).abs().max() > 0.1


def test_a_checkpoint_of_the_language_model_alone_is_read_as_published(reference_kernels, step, tmp_path):
    """Step-3.5-Flash: one flat config with fields of its own code, lists that go on for layers that guess, their weights too."""
    whole, (*_, token_ids) = step("published fields"), prompts()
    text = TEXT | SHAPES["published fields"] | {"num_nextn_predict_layers": 1, "model_type": "step3p5"}
    text = {name: value for name, value in text.items() if value is not None}
    for theirs, ours in (("num_attention_groups", "num_key_value_heads"), ("moe_num_experts", "n_routed_experts")):
        text[theirs] = text.pop(ours)
    text |= {"moe_top_k": text.pop("num_experts_per_tok"), "share_expert_dims": text.pop("share_expert_dim")}
    text["attention_other_setting"] = {"num_attention_heads": text.pop("num_sliding_attention_heads")}
    for name in ("layer_types", "rope_theta", "partial_rotary_factors"):
        text[name] = [*text[name], text[name][0]]
    text["architectures"] = ["Step3p5ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    tensors = {name: value for name, value in load_file(whole / "model.safetensors").items() if "vi" not in name[:4]}
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    logprobs = ModelDriver(build_tiny(tmp_path)).prefill(Sequence(token_ids, row=0), chunk=30)
    torch.testing.assert_close(logprobs, oracle_logprobs(whole, tuple(token_ids)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [1e-3, 0.5, 7.0, 16.0])
def test_a_limited_gate_is_a_limit_of_its_silu(limit):
    gate = torch.linspace(-30, 30, 100_001, dtype=torch.float64)
    expected = torch.nn.functional.silu(gate).clamp(max=limit)
    found = torch.nn.functional.silu(gate.clamp(max=before_silu(limit)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": False}, "gating=False of config.json is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True of config.json is not supported"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelRegistry.resolve("Step3p5ForCausalLM").make_spec(HFConfig(TEXT | changes))
