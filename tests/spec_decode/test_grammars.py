"""Guesses of requests whose output follows a grammar, with the demo model: the same text as without them."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 30}
FORMS: list[dict[str, Any]] = [
    {"regex": "((red|green|blue), ){10,20}"},
    {"json": LIST},
    {"grammar": 'root ::= ("ab" | "cd" | "ab ab ")+ "."'},
]


def answers(**settings: Any) -> tuple[list[list[int]], Any]:
    llm = LLM(max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=16 << 20, cpu_threads=1, **settings)
    params = [
        SamplingParams(
            max_tokens=48,
            temperature=temperature,
            seed=5,
            structured_outputs=StructuredOutputsParams(**form),
            logprobs=logprobs,
        )
        for form in FORMS
        for temperature, logprobs in ((0.0, None), (0.9, None), (0.9, 1))
    ]
    prompts = ["Colours: red, green, blue, red, green, blue, red, green, ab ab ab cd"] * len(params)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], llm.call("stats")


@pytest.mark.timeout(600)
def test_texts_of_grammars_are_the_same_with_guesses() -> None:
    expected, _ = answers()
    always = {"method": "ngram", "num_speculative_tokens": 5, "enable_adaptive_verification": False}
    tokens, stats = answers(speculative_config=always)
    assert tokens == expected
    assert 0 < sum(stats.accepted_per_position) < stats.num_draft_tokens
