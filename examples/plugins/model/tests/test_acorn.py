"""A checkpoint of the architecture runs: here the demo model, under the new name."""

from quire import LLM, ModelRegistry, SamplingParams


def test_a_checkpoint_of_the_architecture_answers() -> None:
    llm = LLM(hf_overrides={"architectures": ["AcornForCausalLM"]}, max_model_len=512)
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
    assert answer[0].outputs[0].text == "17 + 25 = 42"
    assert ModelRegistry.resolve("AcornForCausalLM").owner.startswith("acorn (")
