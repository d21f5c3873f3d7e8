"""A prompt that the device's cache has lost comes from the tier, and gives the same tokens."""

from quire import LLM, SamplingParams

PROMPT = "The ship came into the harbour, and the captain looked for his old friend. " * 4


def test_a_lost_prompt_comes_from_the_tier() -> None:
    llm = LLM(max_model_len=512, dtype="float32", kv_transfer_config={"kv_connector": "alder"})
    params = SamplingParams(temperature=0, max_tokens=8)
    first = llm.generate(PROMPT, params)[0]
    llm.generate(["What is 17 + 25?", "Count to five."], params)  # what was saved is told with later steps
    llm.reset_prefix_cache()
    second = llm.generate(PROMPT, params)[0]
    assert list(second.outputs[0].token_ids) == list(first.outputs[0].token_ids)
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 0
