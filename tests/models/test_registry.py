"""The table of architectures."""

import pytest

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.models import registry
from quire.models.defaults import DEFAULTS, completed
from quire.models.registry import ModelRegistry


@pytest.fixture(autouse=True)
def restored_table(monkeypatch):
    ModelRegistry.get_supported_archs()
    monkeypatch.setattr(registry.MODELS, "_entries", dict(registry.MODELS._entries))


def spec_of_nothing(hf):
    raise NotImplementedError


def test_the_built_in_architectures_are_there():
    assert {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"
    } <= set(ModelRegistry.get_supported_archs())  # fmt: skip


def test_an_unknown_architecture_names_the_nearest_and_where_all_are_listed():
    with pytest.raises(
        ConfigError,
        match=r"'LlamaForCausalLMs' has no spec; nearest: LlamaForCausalLM.*`quire models` lists the \d{3} that",
    ) as e:
        ModelRegistry.resolve("LlamaForCausalLMs")
    assert e.value.setting == "model"


def test_the_first_known_of_several_names_is_taken():
    assert ModelRegistry.resolve(["Unheard", "GPT2LMHeadModel"]).architecture == "GPT2LMHeadModel"


def test_a_plugin_adds_an_architecture_by_function_or_path():
    ModelRegistry.register_model("Own", spec_of_nothing, owner="acme")
    ModelRegistry.register_model("Lazy", "quire.models.llama:llama")
    assert ModelRegistry.resolve("Own").owner == "acme"
    with pytest.raises(AttributeError, match=r"config\.json has no"):
        ModelRegistry.resolve("Lazy").make_spec(HFConfig({}))


def test_a_second_registration_is_refused_unless_it_overrides():
    with pytest.raises(
        ConfigError, match="'LlamaForCausalLM' is already registered by 'quire'; 'acme' must pass override"
    ):
        ModelRegistry.register_model("LlamaForCausalLM", spec_of_nothing, owner="acme")
    ModelRegistry.register_model("LlamaForCausalLM", spec_of_nothing, owner="acme", override=True)
    assert ModelRegistry.resolve("LlamaForCausalLM").owner == "acme"


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_what_a_config_leaves_out_is_what_its_class_has(architecture):
    transformers = pytest.importorskip("transformers")
    whole = getattr(transformers, architecture).config_class().to_dict()
    left_out = {*DEFAULTS[architecture], *(("rope_parameters",) if "rope_theta" in DEFAULTS[architecture] else ())}
    short = {name: value for name, value in whole.items() if name not in left_out}
    entry = ModelRegistry.resolve(architecture)
    assert len(short) < len(whole)
    assert entry.make_spec(HFConfig(short)) == entry.make_spec(HFConfig(whole))


def test_values_of_a_config_stand_also_where_they_are_null():
    config = completed("MistralForCausalLM", HFConfig({"sliding_window": None, "rope_scaling": {"type": "linear"}}))
    assert config.get("sliding_window") is None
    assert completed("GptOssForCausalLM", HFConfig({"rope_theta": 5.0})).to_dict().keys() & {"rope_parameters"} == set()


@pytest.mark.parametrize(
    ("architecture", "given", "meant"),
    [
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "silu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "gelu"),
        ("Gemma2ForCausalLM", {"hidden_activation": None}, "gelu_pytorch_tanh"),
    ],
)
def test_gelu_means_its_tanh_form_in_the_first_gemma_alone(architecture, given, meant):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, architecture).config_class().to_dict()
    assert {mlp.act for mlp in ModelRegistry.resolve(architecture).make_spec(HFConfig(config | given)).mlps()} == {
        meant
    }
