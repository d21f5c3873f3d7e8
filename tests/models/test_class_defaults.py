"""A config.json that leaves fields out: specs assume for them what the config classes of the installed Transformers do."""

from typing import Any

import pytest
import torch

from quire.config import HFConfig
from quire.layers.decoder_layer import modules_of
from quire.models.registry import Entry, ModelRegistry

transformers = pytest.importorskip("transformers")

NO_MODEL = {
    "Dots1ForCausalLM": "its class has no number of experts by itself",
    "HunYuanDenseV1ForCausalLM": "its class cannot be built without head_dim",
    "HunYuanMoEV1ForCausalLM": "its class cannot be built without head_dim",
    "Lfm2MoeForCausalLM": "its class cannot be built without layer_types",
    "LongcatFlashForCausalLM": "its class allocates matrices for experts that have none",
    "MinistralForCausalLM": "its class cannot be built without head_dim",
    "NemotronForCausalLM": "its class cannot be built without num_key_value_heads",
}
"""Classes of which no model can be compared."""
SMALL = 2e-4
"""Vectors (biases of norms) that are not counted, as a share of all weights."""


def config_class_of(architecture: str) -> Any:
    return getattr(getattr(transformers, architecture, None), "config_class", None)


def of_plain_text(architecture: str) -> bool:
    config_class = config_class_of(architecture)
    return config_class is not None and "text_config" not in config_class().to_dict()


ARCHITECTURES = [name for name in ModelRegistry.get_supported_archs() if of_plain_text(name)]


def can_read(entry: Entry, values: dict[str, Any]) -> bool:
    """False where the spec refuses a config without some field, in place of assuming one."""
    try:
        entry.make_spec(HFConfig(values))
    except (AttributeError, TypeError, ValueError, KeyError):
        return False
    return True


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def whole_of(architecture: str) -> dict[str, Any]:
    """A config.json of nothing but what the class assumes."""
    return config_class_of(architecture)().to_dict() | {"architectures": [architecture]}


def filled_in(architecture: str, values: dict[str, Any]) -> HFConfig:
    """What the config class makes of these values."""
    return HFConfig(config_class_of(architecture).from_dict(values).to_dict())


def shortest(entry: Entry, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that the spec cannot do without."""
    for name in list(values):
        if name != "model_type" and can_read(entry, without(values, name)):
            values = without(values, name)
    return values


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_field_that_is_left_out_is_what_the_class_assumes(architecture):
    entry, whole = ModelRegistry.resolve(architecture), whole_of(architecture)
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM"} <= set(ARCHITECTURES)
    for values in [shortest(entry, whole), *(without(whole, name) for name in whole if name != "model_type")]:
        if can_read(entry, values):
            missing = sorted(set(whole) - set(values))
            assert entry.make_spec(HFConfig(values)) == entry.make_spec(filled_in(architecture, values)), missing


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name.endswith(("CausalLM", "LMHeadModel"))])
def test_the_weights_of_the_shortest_config_are_those_of_the_class(architecture):
    """Finds defaults that the class applies only where it builds modules, such as the size of heads."""
    if architecture in NO_MODEL:
        pytest.skip(NO_MODEL[architecture])
    entry, whole = ModelRegistry.resolve(architecture), whole_of(architecture)
    values = shortest(entry, whole)
    with torch.device("meta"):
        tree = getattr(transformers, architecture)(config_class_of(architecture).from_dict(values))
    modules = modules_of(entry.make_spec(HFConfig(values)))
    found = sum(module.rows * ((module.columns or 1) + (module.bias and module.columns > 0)) for module in modules)
    assert found == pytest.approx(sum(weight.numel() for weight in tree.parameters()), rel=SMALL)


def test_the_size_of_heads_of_qwen3_moe_follows_from_the_hidden_size():
    whole = transformers.Qwen3MoeConfig(hidden_size=96, num_attention_heads=4).to_dict()
    assert "head_dim" not in whole
    spec = ModelRegistry.resolve("Qwen3MoeForCausalLM").make_spec(HFConfig(whole))
    assert {attention.head_dim for attention in spec.attentions()} == {24}
