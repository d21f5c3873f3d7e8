"""A model of a shape without a list gets guesses: attention with its own heads and pages, products as others have them."""

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.kernels.triton.runtime import likeness, places
from quire.kernels.triton.runtime.preparation import list_name

ATTENTION = ("attention.decode_kernel", "attention.rope", "attention.prefill", "attention.hopper")


@pytest.fixture
def config(tmp_path):
    model = make_tiny_model("Qwen3ForCausalLM", tmp_path)

    def make(**shape):
        shape = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, **shape}
        settings = {"block_size": shape.pop("block_size", 16), "dtype": "bfloat16"}
        return EngineArgs(model=str(model), device="cpu", hf_overrides=shape, **settings).create_engine_config()

    return make


def attention_of(variants):
    return {
        places.identity(variant)
        for variant in variants
        if variant["kernel"].removeprefix("quire.kernels.triton.").startswith(ATTENTION)
    }


def recorded():
    """A shipped list of Qwen3ForCausalLM's, whose model has the same heads as the fixture's."""
    (file,) = places.SHIPPED_LISTS.glob("Qwen3ForCausalLM-bfloat16-sm90-*.json")
    return places.read_list(file)


def test_attention_of_a_wider_model_with_the_same_heads_is_guessed_right(config):
    guessed = likeness.guess(config(), 90)
    assert list_name(config(), 90) not in {file.stem for file in places.SHIPPED_LISTS.iterdir()}
    assert attention_of(recorded()) <= attention_of(guessed)
    steps = [variant for variant in recorded() if not likeness.is_of_feature(variant)]
    assert guessed[: len(steps)] == steps, "steps of the same architecture come first"
    assert not any(map(likeness.is_of_feature, guessed[: len(steps)])) and likeness.is_of_feature(guessed[-1])
    assert not any("fp8" in variant["kernel"] or ".moe_" in variant["kernel"] for variant in guessed)


def test_heads_and_pages_are_put_in_place(config):
    guessed = likeness.guess(config(num_attention_heads=32, block_size=32), 90)
    kernels = {variant["kernel"].rpartition(".")[2]: variant for variant in reversed(guessed)}
    decode = kernels["decode_kernel:decode_kernel"]["constants"]
    assert (decode["PAGE"], decode["G"], decode["K"], decode["PARTS"]) == (32, 4, 8, 8)
    assert kernels["rope:_rope_and_cache"]["constants"]["N"] == 32
    hopper = kernels["hopper_kernel:prefill_kernel"]
    assert (hopper["constants"]["GROUP"], hopper["constants"]["PACK"]) == (4, 4)
    assert "bf16[32, 64]" in hopper["types"]["kv_desc"] and "bf16[16, 4, 64]" in hopper["types"]["q_desc"]


def test_another_type_or_device_is_not_guessed_from(config):
    assert likeness.guess(config(), 80) == []
