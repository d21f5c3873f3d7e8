"""Finds the text that is nearest to a query: python examples/embeddings.py [MODEL]

The demo model is no embedding model: its order means little. Try BAAI/bge-small-en-v1.5.
"""

import sys

import numpy as np

from quire import LLM

TEXTS = ["The tower is three hundred metres tall.", "Cats sleep most of the day.", "Rivers carry water to the sea."]
QUERY = "How tall is the tower?"


def main(model: str | None = None) -> None:
    """Prints the texts, the nearest first, with their cosine similarity to the query."""
    llm = LLM(model, runner="pooling", max_model_len=512)
    vectors = np.array([output.outputs.embedding for output in llm.embed([QUERY, *TEXTS])])
    similarities = vectors[1:] @ vectors[0]
    for index in np.argsort(-similarities):
        print(f"{similarities[index]:.3f}  {TEXTS[index]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
