"""Answers a data set with Ray Data, a copy of the model in each worker: python examples/ray_data.py [MODEL]

Needs `pip install "ray[data]"`. With more `concurrency`, and `num_gpus=1`, a cluster works on the blocks in parallel.
"""

import sys
from typing import Any

QUESTIONS = ["What is 17 + 25?", "Sort these: pear, apple, fig", "What is the capital of France?"]


class Answers:
    """A worker: the engine is made once, and answers batch after batch."""

    def __init__(self, model: str | None) -> None:
        from quire import LLM, SamplingParams

        self.llm = LLM(model, max_model_len=1024)
        self.params = SamplingParams(temperature=0, max_tokens=64)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        conversations = [[{"role": "user", "content": str(question)}] for question in batch["question"]]
        outputs = self.llm.chat(conversations, self.params, use_tqdm=False)
        return {**batch, "answer": [output.outputs[0].text.strip() for output in outputs]}


def main(model: str | None = None) -> None:
    """Prints an answer to each question."""
    import ray  # pyright: ignore[reportMissingImports]

    rows = ray.data.from_items([{"question": question} for question in QUESTIONS])
    answers = rows.map_batches(Answers, fn_constructor_args=[model], batch_size=64, concurrency=1)
    for row in answers.take_all():
        print(f"{row['question']} -> {row['answer']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
