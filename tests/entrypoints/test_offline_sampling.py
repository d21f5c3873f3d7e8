"""vLLM's sampling fields beyond OpenAI's through `LLM`, on the demo model."""

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, kv_cache_memory_bytes=32 << 20) as llm:
        yield llm


def token(llm: LLM, text: str) -> int:
    (token_id,) = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return token_id


@pytest.mark.parametrize("thinks", [True, None])
def test_the_prompt_tells_where_a_chat_thinks(llm: LLM, thinks: bool | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, thinking_token_budget=5, skip_special_tokens=False)
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    (output,) = llm.chat(QUESTION, params, use_tqdm=False, chat_template_kwargs=kwargs)
    token_ids = list(output.outputs[0].token_ids)
    start, end = token(llm, "<think>"), token(llm, "</think>")
    if token_ids[0] == start:
        assert token_ids.index(end) == 6
    assert params.thinking is None, "the user's parameters stay as they are"
    assert thinks is None or token_ids[0] == start


def test_a_spent_budget_is_told_in_the_operator_s_words() -> None:
    words = "I have to answer now.</think>"
    config = {"reasoning_parser": "qwen3", "reasoning_start_str": "<think>", "reasoning_end_str": words}
    with LLM(max_model_len=512, kv_cache_memory_bytes=32 << 20, reasoning_config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, thinking_token_budget=5, skip_special_tokens=False)
        (output,) = llm.chat(QUESTION, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
        token_ids = list(output.outputs[0].token_ids)
        close = llm.get_tokenizer().encode(words, add_special_tokens=False)
        assert token_ids[0] == token(llm, "<think>") and token_ids[6 : 6 + len(close)] == close
        params.thinking_token_budget = 99
        (free,) = llm.chat(QUESTION, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
        assert words not in free.outputs[0].text and "</think>" in free.outputs[0].text


def test_named_tokens_and_repetition_come_with_each_other(llm: LLM) -> None:
    again = token(llm, "a")
    params = SamplingParams(
        max_tokens=30,
        logit_bias={again: 100.0},
        temperature=0.0,
        logprob_token_ids=[again, token(llm, "Y")],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=1, min_count=3),
    )
    choice = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
    assert list(choice.token_ids) == [again] * 3 and choice.finish_reason == "repetition"
    assert choice.logprobs is not None and choice.cumulative_logprob is not None
    for position in choice.logprobs:
        assert list(position) == [again, token(llm, "Y")]
        assert position[again].rank is not None and position[token(llm, "Y")].rank is None


def test_what_cannot_be_kept_is_refused(llm: LLM) -> None:
    params = SamplingParams(thinking_token_budget=3, structured_outputs=StructuredOutputsParams(choice=["a"]))
    with (
        LLM(
            max_model_len=512, kv_cache_memory_bytes=32 << 20, structured_outputs_config={"enable_in_reasoning": True}
        ) as inside,
        pytest.raises(RequestError, match="enable_in_reasoning"),
    ):
        inside.generate("x", params, use_tqdm=False)
    with pytest.raises(RequestError, match="logprob_token_ids has token id"):
        llm.generate("x", SamplingParams(logprob_token_ids=[1 << 30]), use_tqdm=False)
