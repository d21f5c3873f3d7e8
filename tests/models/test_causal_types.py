"""Each model type that Transformers lists as a causal language model gives the tokens and logprobs of Transformers, by a spec or
through the modules of Transformers, or is refused in words."""

import json

import pytest
from packaging.version import Version
from tests.models.causal_types import CHECKED, TYPES, make_config, make_model
from tests.models.test_drawn_configs import assert_equal

from quire import LLM
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES  # noqa: E402

RUN = [name for name, each in TYPES.items() if each.how in ("spec", "transformers") and name in ARCHITECTURES]
REFUSED = [name for name, each in TYPES.items() if each.how == "refused" and name in ARCHITECTURES]
IS_KNOWN = Version(transformers.__version__) <= Version(CHECKED)
CODE = ("Error", "meta tensor", "NoneType", "Traceback", "object has no attribute")
"""What a refusal must not say."""


@pytest.mark.skipif(not IS_KNOWN, reason="the installed Transformers is newer than the table")
def test_the_table_has_each_type_that_transformers_lists():
    assert set(TYPES) >= set(ARCHITECTURES)


@pytest.mark.skipif(not IS_KNOWN, reason="the installed Transformers is newer than the table")
def test_types_are_specs_exactly_where_their_architecture_has_one():
    known = set(ModelRegistry.get_supported_archs())
    assert {name for name in RUN if TYPES[name].how == "spec"} == {
        name for name, architecture in ARCHITECTURES.items() if architecture in known
    }


def check(model_type, folder):
    """Chunked prompts, batches, the prefix cache and decoding."""
    oracle = make_model(model_type, ARCHITECTURES[model_type], folder)
    assert_equal(oracle, folder, turns=3, max_num_seqs=4, max_num_batched_tokens=23)


@pytest.mark.parametrize("model_type", RUN)
def test_a_type_gives_transformers_tokens_and_logprobs(model_type, tmp_path):
    check(model_type, tmp_path)


def test_the_class_of_a_larger_models_text_is_given_the_texts_config(tmp_path):
    check("emu3", tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_cannot_run_is_refused_in_words(model_type, tmp_path):
    config = make_config(model_type, ARCHITECTURES[model_type])
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
    with pytest.raises(ConfigError) as raised:
        LLM(
            str(tmp_path),
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=2,
            max_model_len=64,
        )
    message, reason = str(raised.value), TYPES[model_type].reason
    assert any(each in message for each in ((reason,) if isinstance(reason, str) else reason))
    assert f"model_type={model_type!r}" in message
    assert message.rstrip().endswith("Choose another model, or run this one with Transformers itself")
    assert not [word for word in CODE if word in message]
