"""`trace_decode_token_ids`: an output that is given, with the logprobs that the model gives it."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError

PROMPT = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 24) as llm:
        yield llm


def logprobs_of(output) -> list[float]:
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def test_the_output_is_the_trace_with_its_logprobs(llm: LLM) -> None:
    eos, *_ = llm.llm_engine.vllm_config.model.eos_token_ids
    trace = [31, eos, 32, 33, 31, 34]
    replay = SamplingParams(
        trace_decode_token_ids=trace, logprobs=2, temperature=0.9, bad_words=["a"], stop_token_ids=[33]
    )
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [5, 6, 7]}]
    replayed, other = llm.generate(prompts, [replay, plain], use_tqdm=False)
    (alone,) = llm.generate(prompts[1:], plain, use_tqdm=False)
    assert replayed.outputs[0].token_ids == trace and replayed.outputs[0].finish_reason == "length"
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids
    whole = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (read,) = llm.generate([{"prompt_token_ids": [*PROMPT, *trace]}], whole, use_tqdm=False)
    expected = [entry[token].logprob for token, entry in zip(trace, read.prompt_logprobs[len(PROMPT) :], strict=True)]
    assert logprobs_of(replayed.outputs[0]) == pytest.approx(expected, abs=1e-4)


def test_a_trace_ends_where_the_models_length_ends(llm: LLM) -> None:
    params = SamplingParams(trace_decode_token_ids=[31] * 100)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [31] * 60


@pytest.mark.parametrize(
    ("trace", "others"),
    [([], {}), ([-1], {}), (["a"], {}), ("text", {}), ([1], {"thinking_token_budget": 3})],
)
def test_what_is_no_trace_is_refused(trace, others) -> None:
    with pytest.raises(RequestError, match="trace_decode_token_ids"):
        SamplingParams(trace_decode_token_ids=trace, **others)


def test_a_token_that_the_vocabulary_lacks_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="trace_decode_token_ids has token id 999999"):
        llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(trace_decode_token_ids=[999999]), use_tqdm=False)


def test_guesses_that_differ_from_the_trace_are_not_taken() -> None:
    pattern = [31, 32, 33, 34]
    trace = [*pattern, 31, 32, 40, 33, *pattern] * 2
    guessing = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    settings = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}
    with LLM(dtype="float32", speculative_config=guessing, disable_log_stats=False, **settings) as llm:
        params = SamplingParams(trace_decode_token_ids=trace, logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": pattern * 8}], params, use_tqdm=False)
        figures = {each.name: each for each in llm.get_metrics()}
    assert output.outputs[0].token_ids == trace and len(output.outputs[0].logprobs) == len(trace)
    assert figures["quire:spec_decode_num_accepted_tokens"].value > 0
