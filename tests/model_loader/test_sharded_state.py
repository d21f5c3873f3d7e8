"""Finished weights in files: what was saved computes the same, and does not load where it would not."""

import pytest
from safetensors import safe_open
from tests.oracles.quantized_models import FLOAT8, ROUNDING, WEIGHT_ONLY, store
from tests.oracles.quantized_variants import VARIANTS
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.errors import ConfigError

SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "num_gpu_blocks_override": 20, "skip_tokenizer_init": True}


def tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [7, 8, 9, 10]}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def state_of(path, folder, **settings):
    """(tokens of the model, the folder with its state)."""
    llm = LLM(model=str(path), **SETTINGS, **settings)
    llm.save_sharded_state(str(folder), max_size=30_000)
    assert (folder / "config.json").read_bytes() == (path / "config.json").read_bytes()
    return tokens(llm)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("GPT2LMHeadModel", {}),
        ("Gemma2ForCausalLM", {"dtype": "bfloat16"}),
        ("Qwen3MoeForCausalLM", {}),
    ],
)
def test_a_saved_state_computes_the_same(architecture, settings, tmp_path):
    path = make_tiny_model(architecture, tmp_path / "plain", tokenizer=False)
    expected = state_of(path, tmp_path / "state", **settings)
    files = sorted((tmp_path / "state").glob("*.safetensors"))
    assert files[0].name == "model-rank-0-part-0.safetensors"
    assert len(files) > 1
    assert tokens(LLM(model=str(tmp_path / "state"), load_format="sharded_state", **SETTINGS, **settings)) == expected


FORMATS = FLOAT8 | ROUNDING | WEIGHT_ONLY | VARIANTS


@pytest.mark.parametrize(
    ("architecture", "name", "ranks"),
    [
        ("LlamaForCausalLM", "gptq 4 bits, act order", 1),
        ("LlamaForCausalLM", "compressed int8, channels", 1),
        ("LlamaForCausalLM", "fbgemm", 1),
        ("Qwen3MoeForCausalLM", "compressed 4 bits", 1),
        pytest.param("LlamaForCausalLM", "bitsandbytes nf4", 1, marks=pytest.mark.exhaustive),
        pytest.param("LlamaForCausalLM", "hqq 3 bits", 1, marks=pytest.mark.exhaustive),
        pytest.param("LlamaForCausalLM", "awq", 2, marks=pytest.mark.exhaustive),
        pytest.param("Qwen3MoeForCausalLM", "compressed 4 bits", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_state_in_a_number_format_computes_the_same(architecture, name, ranks, tmp_path):
    sizes = {"moe_intermediate_size": 64} if "Moe" in architecture else {"intermediate_size": 128}
    path = make_tiny_model(architecture, tmp_path / "plain", tokenizer=False, **sizes)
    store(path, tmp_path / "stored", FORMATS[name])
    expected = state_of(tmp_path / "stored", tmp_path / "state", tensor_parallel_size=ranks)
    state = LLM(model=str(tmp_path / "state"), load_format="sharded_state", tensor_parallel_size=ranks, **SETTINGS)
    assert tokens(state) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_state_of_weights_rounded_at_load_computes_the_same(quantization, tmp_path):
    path = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", tokenizer=False)
    expected = state_of(path, tmp_path / "state", quantization=quantization)
    settings = {"load_format": "sharded_state", "quantization": quantization}
    assert tokens(LLM(model=str(tmp_path / "state"), **settings, **SETTINGS)) == expected


def test_it_says_what_differs(tmp_path):
    path = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", tokenizer=False)
    state_of(path, tmp_path / "state")
    with safe_open(tmp_path / "state" / "model-rank-0-part-0.safetensors", "pt") as handle:
        assert handle.metadata()["rank"] == "0 of 1"
    with pytest.raises(ConfigError, match=r"was saved with dtype='torch.float32' \(here 'torch.bfloat16'\)"):
        LLM(model=str(tmp_path / "state"), load_format="sharded_state", dtype="bfloat16", **SETTINGS)
    with pytest.raises(ConfigError, match="exists already"):
        state_of(path, tmp_path / "state")
    with pytest.raises(ConfigError, match=r"must contain \{rank\} and \{part\}"):
        LLM(model=str(path), **SETTINGS).save_sharded_state(str(tmp_path / "other"), pattern="model.safetensors")
    with pytest.raises(ConfigError, match="has no model-rank-0-part"):
        LLM(model=str(path), load_format="sharded_state", **SETTINGS)
