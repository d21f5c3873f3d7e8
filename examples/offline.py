"""Generates text for a batch of prompts, without a server: python examples/offline.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "Sort these: pear, apple, fig", "What is the capital of France?"]


def main(model: str | None = None) -> None:
    """Prints an answer to each question."""
    llm = LLM(model, max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question} -> {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
