"""The whole engine against Transformers in float32: chunked prefill, prefix hits, preemption and batch orders change nothing."""

import random

import pytest
import torch
from tests.oracles.tiny_models import load_oracle

from quire import LLM, SamplingParams

ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GPT2LMHeadModel": {},
    "Gemma3ForCausalLM": {},
}
NEW_TOKENS = 10

SETTINGS = {
    "roomy": {"max_num_seqs": 8},
    "chunked prefill": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages, so that requests are preempted": {"max_num_seqs": 8, "num_gpu_blocks_override": 26},
    "no prefix cache, eager": {"enable_prefix_caching": False, "max_num_seqs": 3, "enforce_eager": True},
}
COMMON = {
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
    "skip_tokenizer_init": True,
}


def make_prompts() -> list[list[int]]:
    """Lengths from one token to several pages; some share their first pages."""
    draw = random.Random(7)
    shared = [draw.randrange(4, 300) for _ in range(40)]
    prompts = [[draw.randrange(4, 300) for _ in range(length)] for length in (1, 5, 16, 17, 33, 60)]
    return prompts + [[*shared[:length], draw.randrange(4, 300)] for length in (20, 32, 40)]


def assert_parity(oracle, prompts, outputs):
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        with torch.no_grad():
            logprobs = oracle(torch.tensor([prompt + token_ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert token_ids == logprobs.argmax(-1).tolist()
        for position, token in enumerate(token_ids):
            assert completion.logprobs[position][token].logprob == pytest.approx(
                float(logprobs[position, token]), abs=1e-3
            )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_gives_transformers_tokens_and_logprobs(architecture, setting, tiny):
    path = tiny(architecture, **ARCHITECTURES[architecture])
    llm = LLM(model=str(path), **(COMMON | SETTINGS[setting]))
    oracle = load_oracle(path)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    prompts = make_prompts()
    for order in (1, -1):  # the second time, from the other end, with whatever the prefix cache kept
        batch = prompts[::order]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        assert_parity(oracle, batch, outputs)
