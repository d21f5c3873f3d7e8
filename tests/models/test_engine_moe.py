"""Mixtures in the whole engine, with every kind of pages beside them, against Transformers in float32."""

import pytest
from tests.models.test_engine_parity import COMMON, NEW_TOKENS, assert_parity, make_prompts
from tests.models.test_parity_moe import SHAPES
from tests.oracles.tiny_models import load_oracle

from quire import LLM, SamplingParams

MODELS = {
    "gpt-oss": {"sliding_window": 24},
    "llama4": {"attention_chunk_size": 32},
    "deepseek v3": {},
    "granite moe shared": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_gives_transformers_tokens_and_logprobs(name, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **(overrides | MODELS[name]))
    llm = LLM(model=str(path), **(COMMON | {"max_num_batched_tokens": 32, "max_num_seqs": 4}))
    oracle = load_oracle(path)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    for batch in (make_prompts(), make_prompts()[::-1]):  # the second time with what the prefix cache kept
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        assert_parity(oracle, batch, outputs)
