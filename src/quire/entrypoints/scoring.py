"""Pairs of texts that are scored: which belong together, as one prompt for a cross-encoder, and how near two
embeddings are.

Shared by `LLM` and the server; queues nothing.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

from quire.config import PoolingConfig
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.pooling_processor import PoolingProcessor
from quire.errors import RequestError
from quire.inputs import PromptType
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.tokenizers.chat_template import ChatTemplate
from quire.tokenizers.interface import Tokenizer


def pair_texts(
    data_1: str | Sequence[str], data_2: str | Sequence[str], names: tuple[str, str] = ("data_1", "data_2")
) -> tuple[list[str], list[str]]:
    """As many first texts as second ones; a single first text is paired with every second one.
    Raises RequestError: they are not texts, or not as many."""
    firsts = [data_1] if isinstance(data_1, str) else list(data_1)
    seconds = [data_2] if isinstance(data_2, str) else list(data_2)
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts or not all(isinstance(text, str) for text in texts):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"{name} must be a text, or a list of texts", param=name)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}: give one and many, or as many of both",
            param=names[1],
        )
    return firsts, seconds


def check_scores(config: PoolingConfig) -> None:
    """Raise unless a model can score pairs: by embeddings, or by reading both texts."""
    if not config.embeds and (config.num_labels != 1 or "classify" not in config.tasks):
        raise RequestError(
            f"score needs an embedding model or a classifier with one label; this model runs as {config.convert!r} with "
            f"{config.num_labels} labels",
            param="task",
        )


def pair_prompts(
    processor: PoolingProcessor,
    pairs: Sequence[tuple[str, str]],
    params: PoolingParams,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    variables: dict[str, Any] | None = None,
) -> list[TokenizedPrompt]:
    """Each pair as one prompt: written by a template that knows the roles `query` and `document`, and these variables; without a
    template, as the tokenizer joins pairs."""
    if template is None:
        return [processor.tokenize_pair(first, second, params) for first, second in pairs]
    texts = [
        template.render(
            [{"role": "query", "content": first}, {"role": "document", "content": second}],
            tools=None,
            documents=None,
            add_generation_prompt=False,
            continue_final_message=False,
            variables={**tokenizer.special_tokens_map, **(variables or {})},
        )
        for first, second in pairs
    ]
    return processor.tokenize_batch(cast("list[PromptType]", texts))


def scored_task(config: PoolingConfig) -> str:
    """What each text, or each pair, is asked for."""
    if not config.embeds:
        return "classify"
    return "embed" if "embed" in config.tasks else "token_embed"


def similarity(first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]) -> float:
    """Of two embeddings their cosine, 0 where one has no length. Of embeddings of each token, as ColBERT compares them: for each
    of the first text the greatest product with one of the second, added up (https://arxiv.org/abs/2004.12832)."""
    a, b = first.outputs.data, second.outputs.data
    if a.ndim == 2:
        return float((a @ b.T).max(axis=1).sum())
    length = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / length if length else 0.0
