"""Which number format a model's matrices have."""

import re
from pathlib import Path

import pytest
import torch

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.kernels.packed import dequantize
from quire.kernels.types import PackedWeight
from quire.layers.linear import ROWS, Axis, Stored, UnquantizedLinear
from quire.quantization import registry
from quire.quantization.registry import Format, linear_method, register_linear_method
from quire.quantization.scheme import Form, Scheme


class Int8(UnquantizedLinear):
    name = "mine"


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(registry.METHODS, "_entries", dict(registry.METHODS._entries))
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
    with pytest.raises(ConfigError, match="quantization 'mine' is already registered by 'the program'"):
        register_linear_method("mine", UnquantizedLinear)
    register_linear_method("mine", UnquantizedLinear, override=True)


def test_the_guides_example_of_a_format_works():
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    (example,) = re.findall(r"```python\n(def parse.*?)```", text, re.S)
    names = {
        "torch": torch, "Stored": Stored, "Axis": Axis, "ROWS": ROWS, "PackedWeight": PackedWeight, "Scheme": Scheme,
        "Form": Form, "Format": Format, "register_linear_method": lambda *given: register_linear_method(*given, override=True),
    }  # fmt: skip
    exec(example, names)
    method = linear_method(None, checkpoint("mine"))
    scheme = method.scheme("layers.0.mlp.down_proj")
    codes = torch.arange(64, dtype=torch.uint8).expand(2, 64)
    weight = method.decode("x", {"codes": codes, "scale": torch.ones(2, 2)}, (2, 128), torch.float32)
    assert dequantize(weight)[0, :4].tolist() == [0, 0, 1, 0]
    assert scheme.form.num_bytes(2, 128, torch.float32) == 2 * (64 + 8)
