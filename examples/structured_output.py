"""Constrains the output with a schema, a regular expression and choices: python examples/structured_output.py [MODEL]"""

import json
import sys

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS = {
    "Make JSON with name Bob and age 7": StructuredOutputsParams(json=PERSON),
    "What is 17 + 25?": StructuredOutputsParams(regex=r"[0-9]+ \+ [0-9]+ = [0-9]+"),
    "What is the capital of France?": StructuredOutputsParams(choice=["Berlin", "Paris", "Rome"]),
}


def main(model: str | None = None) -> None:
    """Prints one answer of each kind."""
    llm = LLM(model, max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question in REQUESTS]
    params = [
        SamplingParams(temperature=0, max_tokens=100, structured_outputs=constraint) for constraint in REQUESTS.values()
    ]
    person, result, city = (output.outputs[0].text for output in llm.chat(conversations, params))
    print(json.loads(person), result, city, sep="; ")


if __name__ == "__main__":
    main(*sys.argv[1:2])
