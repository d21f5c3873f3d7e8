"""A number in config.json that no model can have is refused with its field, before anything is built of it."""

import json

import pytest
from tests.oracles.tiny_models import make_tiny_model, tiny_values

from quire import LLM
from quire.config import HFConfig
from quire.errors import ConfigError
from quire.layers.spec_check import check_spec
from quire.models.registry import ModelRegistry

WRONG = (
    ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 0}, "num_experts_per_tok of config.json is 0, and must be a whole number"),
    ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok of config.json is 9, and must be from 1 to 8"),
    ("Ernie4_5_MoeForCausalLM", {"moe_k": 8}, "moe_k of config.json is 8, and must be from 1 to 7"),
    ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group of config.json is 3, and must divide n_routed_experts=8"),
    ("DeepseekV3ForCausalLM", {"topk_group": 5}, "topk_group of config.json is 5, and must be at most n_group=4"),
    ("DeepseekV3ForCausalLM", {"topk_group": 1}, "num_experts_per_tok of config.json is 3, and must be from 1 to 2, the"),
    ("DeepseekV3ForCausalLM", {"moe_intermediate_size": -1}, "moe_intermediate_size of config.json is -1"),
    ("LlamaForCausalLM", {"num_key_value_heads": 0}, "num_key_value_heads of config.json is 0"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads of config.json is 3, and must divide num_attention_"),
    ("LlamaForCausalLM", {"intermediate_size": 0}, "intermediate_size of config.json is 0"),
    ("LlamaForCausalLM", {"intermediate_size": [96]}, r"intermediate_size of config.json is \[96\], and must be a whole number"),
    ("LlamaForCausalLM", {"hidden_size": 64.0, "head_dim": 16}, "hidden_size of config.json is 64.0, and must be a whole"),
    ("LlamaForCausalLM", {"rms_norm_eps": "1e-6"}, "rms_norm_eps of config.json is '1e-6', and must be a number"),
    ("Mamba2ForCausalLM", {"n_groups": 3}, "n_groups of config.json is 3, and must divide num_heads=8"),
    ("RecurrentGemmaForCausalLM", {"lru_width": 70}, "num_attention_heads of config.json is 4, and must divide lru_width=70"),
    ("KimiLinearForCausalLM", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim of config.json is 0"),
    ("Qwen3NextForCausalLM", {"linear_num_key_heads": 3}, "linear_num_key_heads of config.json is 3, and must divide linear_"),
)  # fmt: skip


@pytest.mark.parametrize(("architecture", "edit", "message"), WRONG)
def test_a_number_that_no_model_has_is_refused_with_its_field(architecture, edit, message):
    hf = HFConfig(_config(architecture) | edit)
    with pytest.raises(ConfigError, match=message):
        check_spec(ModelRegistry.resolve(architecture).make_spec(hf), hf)


def test_a_least_sum_of_experts_weights_is_refused():
    hf = HFConfig(_config("Ernie4_5_MoeForCausalLM") | {"moe_norm_min": 0.5})
    with pytest.raises(ConfigError, match=r"moe_norm_min=0\.5 of config\.json is not supported: at most 1e-6"):
        ModelRegistry.resolve("Ernie4_5_MoeForCausalLM").make_spec(hf)


def test_the_field_may_stand_in_the_text_part():
    text = _config("LlamaForCausalLM") | {"model_type": "llama", "num_key_value_heads": 3}
    hf = HFConfig({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    with pytest.raises(ConfigError, match=r"num_key_value_heads of config\.json is 3"):
        check_spec(ModelRegistry.resolve(hf.architectures).make_spec(hf), hf)


@pytest.mark.parametrize(
    ("architecture", "edit", "message"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 0}, "num_experts_per_tok of config.json is 0"),
        ("FalconH1ForCausalLM", {"ssm_in_multiplier": 0}, r"division by zero \(0 is the value of .*ssm_in_multiplier"),
    ],
)
def test_an_engine_is_refused_before_it_computes(architecture, edit, message, tmp_path):
    path = make_tiny_model(architecture, tmp_path, tokenizer=False)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | edit))
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=20)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_a_stretched_rotation_needs_its_factor(kind):
    hf = HFConfig(_config("LlamaForCausalLM") | {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0}})
    with pytest.raises(ConfigError, match=f"rope_scaling of type '{kind}' has factor=None"):
        ModelRegistry.resolve("LlamaForCausalLM").make_spec(hf)


@pytest.mark.parametrize(
    ("architecture", "known"),
    [
        ("Gemma3ForCausalLM", "sliding_attention, full_attention"),
        ("Qwen2ForCausalLM", "sliding_attention, full_attention"),
        ("Llama4ForCausalLM", "chunked_attention, full_attention"),
        ("Qwen3NextForCausalLM", "linear_attention, full_attention"),
        ("GraniteMoeHybridForCausalLM", "mamba, attention, linear_attention, full_attention"),
    ],
)
def test_a_layer_of_another_kind_is_refused_with_those_that_are_known(architecture, known):
    values = _config(architecture) | {"use_sliding_window": True}
    hf = HFConfig(values | {"layer_types": ["conv"] * values["num_hidden_layers"]})
    with pytest.raises(ConfigError, match=f"layer_types of config.json has 'conv'; known: {known}"):
        ModelRegistry.resolve(architecture).make_spec(hf)


def _config(architecture):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, architecture).config_class(**tiny_values(architecture))
    return json.loads(config.to_json_string()) | {"architectures": [architecture]}
