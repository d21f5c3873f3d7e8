"""Models of Transformers on our pages: the same tokens and logprobs as Transformers alone, and clear refusals."""

import json

import pytest
from tests.models.test_engine_parity import COMMON, NEW_TOKENS, assert_parity, make_prompts

from quire import LLM, SamplingParams
from quire.benchmarks.tiny_models import load_oracle
from quire.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Gemma2ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "CohereForCausalLM": {},
    "PhiForCausalLM": {},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_modules_on_our_pages_give_its_own_tokens(architecture, tiny):
    path = tiny(architecture, **ARCHITECTURES[architecture])
    llm = LLM(model=str(path), model_impl="transformers", max_num_seqs=4, **(COMMON | {"max_num_batched_tokens": 24}))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    prompts = make_prompts()
    for order in (1, -1):
        batch = prompts[::order]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        assert_parity(load_oracle(path), batch, outputs)


def test_online_formats_reach_its_matrices(tiny):
    path = tiny("LlamaForCausalLM")
    llm = LLM(model=str(path), model_impl="transformers", quantization="int8", max_num_seqs=2, **COMMON)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_what_nobody_knows_is_refused(tiny, tmp_path):
    values = json.loads((tiny("LlamaForCausalLM") / "config.json").read_text())
    values |= {"architectures": ["UnheardForCausalLM"], "model_type": "unheard"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="'UnheardForCausalLM' has no spec"):
        LLM(model=str(tmp_path), max_num_seqs=2, **COMMON)
    with pytest.raises(ConfigError, match="model_type='unheard' is not known to the installed Transformers"):
        LLM(model=str(tmp_path), model_impl="transformers", max_num_seqs=2, **COMMON)


def test_layers_that_keep_something_else_are_refused(tiny):
    path = tiny("OlmoHybridForCausalLM")
    with pytest.raises(ConfigError, match=r"of its 3 layers 1 have attention .*others: linear_attention"):
        LLM(model=str(path), max_num_seqs=2, **COMMON)


def test_a_model_whose_attention_is_not_an_interface_is_refused(tiny, tmp_path):
    values = {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        "vocab_size": 300,
        "d_model": 32,
        "n_layer": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_head": 2, "d_inner": 32, "eos_token_id": 2}))
    with pytest.raises(ConfigError, match="XLNetConfig cannot run on pages"):
        LLM(model=str(tmp_path), max_num_seqs=2, **COMMON)
