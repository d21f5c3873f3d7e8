"""One adapter in the weights: the same logprobs as PEFT's, alone and beside other adapters; what cannot be added is refused."""

from pathlib import Path

import pytest
from tests.lora.conftest import PROMPTS, TOLERANCE, assert_parity, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.errors import ConfigError

SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1}
ADAPTERS = {
    "LlamaForCausalLM": {"target_modules": "all-linear", "lora_alpha": 16},
    "GPT2LMHeadModel": {"target_modules": ["c_attn", "c_proj", "c_fc"]},
    "Phi3ForCausalLM": {"target_modules": "all-linear", "use_rslora": True},
    "Qwen2ForCausalLM": {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": "all"},
}


@pytest.mark.parametrize("architecture", ADAPTERS)
def test_a_merged_adapter_equals_peft(architecture: str, tmp_path: Path):
    base = make_tiny_model(architecture, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", r=4, **ADAPTERS[architecture])
    oracle = PeftOracle(base, adapter)
    llm = LLM(str(base), merge_lora=str(adapter), **SETTINGS)
    for output in run(llm, PROMPTS, [None] * len(PROMPTS)):
        assert worst_difference(output, oracle) < TOLERANCE
    llm.llm_engine.reload_weights()
    assert worst_difference(run(llm, PROMPTS[:1], [None])[0], oracle) < TOLERANCE


def test_embeddings_heads_and_whole_matrices_are_merged(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    ends = make_adapter(base, tmp_path / "ends", r=4, target_modules=["embed_tokens", "lm_head", "o_proj"])
    whole = make_adapter(base, tmp_path / "whole", r=4, target_modules=["v_proj"], modules_to_save=["lm_head"])
    for adapter in (ends, whole):
        llm = LLM(str(base), merge_lora=str(adapter), **SETTINGS)
        assert worst_difference(run(llm, PROMPTS[:1], [None])[0], PeftOracle(base, adapter)) < TOLERANCE


def test_other_adapters_are_served_beside_a_merged_one(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base")
    merged = make_adapter(base, tmp_path / "merged", 1, r=4, target_modules="all-linear")
    merged_base = PeftOracle(base, merged).model.merge_and_unload()
    merged_base.save_pretrained(tmp_path / "merged-base")
    other = make_adapter(tmp_path / "merged-base", tmp_path / "other", 2, r=4, target_modules="all-linear")
    llm = LLM(str(base), merge_lora=str(merged), enable_lora=True, max_num_seqs=16, **SETTINGS)
    assert_parity(llm, tmp_path / "merged-base", [None, other])


def test_an_adapter_that_cannot_be_merged_is_refused_with_its_targets(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=True)
    wide = make_tiny_model("LlamaForCausalLM", tmp_path / "wide", hidden_size=96)
    tied = make_adapter(base, tmp_path / "tied", r=4, target_modules=["embed_tokens"])
    foreign = make_adapter(wide, tmp_path / "foreign", r=4, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="embed_tokens is the head, too"):
        LLM(str(base), merge_lora=str(tied), **SETTINGS)
    with pytest.raises(ConfigError, match=r"q_proj is \[\d+, \d+\] in the model, and \[\d+, 96\] in the adapter"):
        LLM(str(base), merge_lora=str(foreign), **SETTINGS)
    tokens = make_adapter(base, tmp_path / "tokens", r=4, target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ConfigError, match="embed_tokens has trained tokens"):
        LLM(str(base), merge_lora=str(tokens), **SETTINGS)
    with pytest.raises(ConfigError, match="merge_lora needs"):
        LLM(str(base), merge_lora=str(tied), load_format="dummy", **SETTINGS)


def test_settings_of_adapters_that_mean_nothing_here_are_refused_in_words(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base")
    with pytest.raises(
        ConfigError, match="lora_dtype='float16': adapters' numbers are kept in the model's type, float32"
    ):
        LLM(str(base), enable_lora=True, lora_dtype="float16", **SETTINGS)
    with pytest.raises(ConfigError, match=r"default_mm_loras names audio: .* this model reads nothing but text"):
        LLM(str(base), enable_lora=True, default_mm_loras={"audio": "/x"}, **SETTINGS)
    assert LLM(str(base), enable_lora=True, lora_dtype="float32", fully_sharded_loras=True, **SETTINGS)
