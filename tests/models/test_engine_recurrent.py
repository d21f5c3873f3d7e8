"""The whole engine with recurrent layers against Transformers: chunked prefill, prefix hits at page borders, preemption; steps
are recorded."""

import pytest
from tests.models.test_engine_parity import COMMON, NEW_TOKENS, assert_parity, make_prompts
from tests.oracles.tiny_models import load_oracle

from quire import LLM, SamplingParams
from quire.kernels import cpu

ARCHITECTURES = (
    "MambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM",
    "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Zamba2ForCausalLM", "OlmoHybridForCausalLM", "KimiLinearForCausalLM",
    "BailingHybridForCausalLM", "MiniMaxForCausalLM", "Lfm3ForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
)  # fmt: skip
SETTINGS = {
    "roomy": {"max_num_seqs": 8},
    "chunked prefill": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages, so that requests are preempted": {"max_num_seqs": 8, "num_gpu_blocks_override": 46},
    "no prefix cache, eager": {"enable_prefix_caching": False, "max_num_seqs": 3, "enforce_eager": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_gives_transformers_tokens_and_logprobs(architecture, setting, tiny):
    path = tiny(architecture)
    llm = LLM(model=str(path), **(COMMON | {"block_size": 16} | SETTINGS[setting]))
    oracle = load_oracle(path)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    prompts, cached = make_prompts(), 0
    for order in (1, -1):  # the second time, from the other end, with whatever the prefix cache kept
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts[::order]], params, use_tqdm=False)
        assert_parity(oracle, prompts[::order], outputs)
        cached += sum(output.num_cached_tokens or 0 for output in outputs)
    assert (cached > 0) == ("no prefix cache" not in setting)


@pytest.mark.parametrize(
    "architecture", ["MambaForCausalLM", "JambaForCausalLM", "FalconH1ForCausalLM", "Qwen3NextForCausalLM"]
)
def test_random_weights_are_neither_certain_nor_without_a_preference(architecture, tiny):
    llm = LLM(model=str(tiny(architecture)), load_format="dummy", max_num_seqs=4, **COMMON)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    for position, token in enumerate(output.outputs[0].token_ids):
        assert -8.0 < output.outputs[0].logprobs[position][token].logprob < -1e-4


@pytest.mark.skipif(not cpu.library_status()[0], reason="the native kernels are not built here")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_with_recurrent_layers_are_recorded(architecture, tiny, caplog, monkeypatch):
    monkeypatch.setattr("quire.kernels.cpu.recording.logger.propagate", True)
    caplog.set_level("INFO")
    llm = LLM(model=str(tiny(architecture)), max_num_seqs=4, **COMMON)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    assert "not recorded" not in caplog.text
