"""The backend gives the tokens that the platform's own gives, with chunked prompts and several requests at once."""

from quire import LLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "What is the capital of France?", "Count from one to five, please."]


def tokens(backend: str | None) -> list[list[int]]:
    llm = LLM(max_model_len=512, dtype="float32", attention_backend=backend, max_num_batched_tokens=16, max_num_seqs=4)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_the_platforms_own_backend() -> None:
    assert tokens("elm") == tokens(None)
