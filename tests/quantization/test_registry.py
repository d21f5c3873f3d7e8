"""Which number format a model's matrices have."""

import pytest

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.layers.linear import UnquantizedLinear
from quire.quantization import registry
from quire.quantization.registry import linear_method, register_linear_method


class Int8(UnquantizedLinear):
    name = "mine"


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    register_linear_method("mine", Int8)


def checkpoint(method):
    return HFConfig({"quantization_config": {"quant_method": method}})


def test_a_plain_checkpoint_is_unquantized():
    assert linear_method(None, HFConfig({})).name == "unquantized"


def test_the_checkpoint_says_how_it_is_stored():
    assert linear_method(None, checkpoint("mine")).name == "mine"
    assert linear_method("mine", checkpoint("mine")).name == "mine"


def test_the_user_may_ask_for_a_format():
    assert linear_method("mine", HFConfig({})).name == "mine"


def test_a_wish_against_the_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="quantization='mine', but the checkpoint is stored as 'awq'") as caught:
        linear_method("mine", checkpoint("awq"))
    assert caught.value.setting == "quantization"


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"quantization asks for 'int3', which is not supported; supported: .*int4, int8.*, mine, .*unquantized",
    ):
        linear_method("int3", HFConfig({}))


def test_a_second_registration_needs_override():
    with pytest.raises(ConfigError, match="'mine' is already registered by Int8"):
        register_linear_method("mine", UnquantizedLinear)
    register_linear_method("mine", UnquantizedLinear, override=True)
