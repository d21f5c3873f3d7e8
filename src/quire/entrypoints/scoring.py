"""Pairs of texts that are scored: which belong together, as one prompt for a cross-encoder, and how near two
embeddings are.

Shared by `LLM` and the server; queues nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from quire.config import PoolingConfig
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.pooling_processor import PoolingProcessor
from quire.entrypoints.media_parts import PlacedPart
from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence
from quire.inputs import PromptType
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.tokenizers.chat_template import ChatTemplate
from quire.tokenizers.interface import Tokenizer

Parts = tuple[Mapping[str, Any], ...]
Scored = str | Parts
"""What is scored: a text, or the parts of a message. `Given`: how requests have one or several."""
Given = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def pair_inputs(
    data_1: Given, data_2: Given, names: tuple[str, str] = ("data_1", "data_2")
) -> tuple[list[Any], list[Any]]:
    """As many first inputs as second ones, each `Scored`; a single first one is paired with every second one.
    Raises RequestError: they are neither texts nor parts, or not as many."""
    firsts, seconds = (_inputs(given, name) for given, name in zip((data_1, data_2), names, strict=True))
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"{names[0]} has {len(firsts)} inputs and {names[1]} {len(seconds)}: give one and many, or as many of both",
            param=names[1],
        )
    return firsts, seconds


def _inputs(given: Any, name: str) -> list[Scored]:
    """Each by itself: of one `content` each part, in a list each text, part or `content`."""
    if is_mapping(given) and is_sequence(given.get("content")):
        return [_scored([part], f"{name}.content[{at}]", name) for at, part in enumerate(given["content"])]
    if isinstance(given, str) or is_mapping(given):
        return [_scored(given, name, name)]
    found = [_scored(each, f"{name}[{at}]", name) for at, each in enumerate(given)]
    if not found:
        raise RequestError(f"{name} must be a text, or a list of texts", param=name)
    return found


def _scored(given: Any, path: str, name: str) -> Scored:
    if isinstance(given, str):
        return given
    parts = given.get("content", [given]) if is_mapping(given) else given
    if not is_sequence(parts) or not parts or not all(is_mapping(part) and "type" in part for part in parts):
        raise RequestError(f"{name} must be a text or parts of a message, or a list of these", param=name)
    if len(parts) == 1 and isinstance(text := parts[0].get("text"), str):
        return text
    return tuple(PlacedPart(part, path, path) for part in parts)


def each_once(inputs: Iterable[Scored]) -> list[Scored]:
    """Those that are embedded: each once, however often it is paired."""
    return list({key_of(each): each for each in inputs}.values())


def key_of(one: Scored) -> str | int:
    """What tells inputs apart."""
    return one if isinstance(one, str) else id(one)


def check_texts(inputs: Iterable[Scored], name: str) -> None:
    """Raises RequestError: a cross-encoder is given something else."""
    if not all(isinstance(each, str) for each in inputs):
        raise RequestError(f"{name}: this model reads both texts of a pair as one prompt, and no images", param=name)


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
    return config.embedding_task if config.embeds else "classify"


def similarities(
    firsts: Iterable[Scored],
    seconds: Iterable[Scored],
    found: Mapping[str | int, PoolingRequestOutput[PoolingOutput]],
) -> list[float]:
    """Of pairs, whose embeddings are found by `key_of`."""
    return [
        similarity(found[key_of(first)], found[key_of(second)]) for first, second in zip(firsts, seconds, strict=True)
    ]


def similarity(first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]) -> float:
    """Of two embeddings their cosine, 0 where one has no length. Of embeddings of each token, as ColBERT compares them: for each
    of the first text the greatest product with one of the second, added up (https://arxiv.org/abs/2004.12832)."""
    a, b = first.outputs.data, second.outputs.data
    if a.ndim == 2:
        return float((a @ b.T).max(axis=1).sum())
    length = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / length if length else 0.0
