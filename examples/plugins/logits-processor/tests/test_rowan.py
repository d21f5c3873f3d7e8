"""Requests that ask for it do not get the tokens that they forbid; others are left alone."""

from quire import LLM, SamplingParams


def test_forbidden_tokens_do_not_come() -> None:
    llm = LLM(max_model_len=512)
    plain = SamplingParams(temperature=0, max_tokens=8)
    first = llm.generate(["What is"], plain)[0].outputs[0].token_ids
    other = SamplingParams(temperature=0, max_tokens=8, extra_args={"rowan": [first[0]]})
    outputs = llm.generate(["What is", "What is"], [other, plain])
    assert first[0] not in outputs[0].outputs[0].token_ids
    assert outputs[1].outputs[0].token_ids == first


def test_what_is_no_list_of_tokens_is_refused() -> None:
    llm = LLM(max_model_len=512)
    wrong = SamplingParams(max_tokens=2, extra_args={"rowan": "all"})
    try:
        outputs = llm.generate(["a"], wrong)
    except ValueError as error:
        assert "must be a list of token ids" in str(error)
    else:
        assert "must be a list of token ids" in str(outputs[0].error)
