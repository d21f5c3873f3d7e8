"""The routes that compare texts, and images: `/score` and `/rerank`.

A cross-encoder reads both texts of a pair as one prompt; of an embedding model a score tells how near two
embeddings are.
"""

import time
from collections.abc import Sequence
from typing import Any

from quire.config import PoolingConfig, limits
from quire.engine.input_processor import TokenizedPrompt
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.prompts import require_tokenizer, run_sized
from quire.entrypoints.pooling_api import pooling_protocol as protocol
from quire.entrypoints.pooling_api.run import activation, read_prompts, require_pooling, run_pooling, usage_of
from quire.entrypoints.scoring import (
    Scored,
    check_scores,
    check_texts,
    each_once,
    key_of,
    pair_inputs,
    pair_prompts,
    scored_task,
    similarities,
)
from quire.inputs import PromptType
from quire.pooling_params import PoolingParams
from quire.tokenizers.interface import Tokenizer

Names = tuple[str, str]
_PAIRS_OF_NAMES: tuple[Names, ...] = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


async def answer_score(state: ServerState, request: protocol.ScoreRequest, public_id: str) -> protocol.ScoreResponse:
    model = state.resolve_model(request.model)
    names = _names(request)
    firsts, seconds = pair_inputs(getattr(request, names[0]), getattr(request, names[1]), names)
    scores, usage = await _score(state, request, firsts, seconds, names, public_id)
    data = [protocol.ScoreData(index, score) for index, score in enumerate(scores)]
    answer_id, created = f"score-{public_id}", int(time.time())
    return protocol.ScoreResponse(id=answer_id, created=created, model=model, usage=usage, data=data)


def _names(request: protocol.ScoreRequest) -> Names:
    found = [names for names in _PAIRS_OF_NAMES if all(getattr(request, name) is not None for name in names)]
    if len(found) != 1:
        allowed = ", ".join(f"{first} and {second}" for first, second in _PAIRS_OF_NAMES)
        raise bad_field("text_1", f"give one pair of these: {allowed}.", "missing_field")
    return found[0]


async def answer_rerank(state: ServerState, request: protocol.RerankRequest, public_id: str) -> protocol.RerankResponse:
    """The documents, the one that fits the query best first."""
    model = state.resolve_model(request.model)
    if not request.documents:
        raise bad_field("documents", "the list is empty.")
    if request.top_n is not None and request.top_n < 0:
        raise bad_field("top_n", f"{request.top_n} is out of range; at least 0 (0 means all).")
    given = request.documents
    given = given if isinstance(given, dict) else [_document(document, index) for index, document in enumerate(given)]
    names = ("query", "documents")
    queries, documents = pair_inputs(request.query, given, names)
    scores, usage = await _score(state, request, queries, documents, names, public_id)
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))
    results = [protocol.RankedResult(index, scores[index]) for index in order[: request.top_n or None]]
    if request.return_documents is not False:
        for result in results:
            result.document = _ranked(documents[result.index])
    return protocol.RerankResponse(id=f"rerank-{public_id}", model=model, usage=usage, results=results)


def _document(document: str | dict[str, Any], index: int) -> str | dict[str, Any]:
    """A text, or parts of a message."""
    if isinstance(document, str) or "content" in document or "type" in document:
        return document
    if not isinstance(text := document.get("text"), str):
        raise bad_field(f"documents[{index}].text", "expected a string.")
    return text


def _ranked(document: Scored) -> protocol.RankedDocument:
    if isinstance(document, str):
        return protocol.RankedDocument(document)
    return protocol.RankedDocument(multi_modal=document[0] if len(document) == 1 else list(document))


async def _prompt_of(state: ServerState, one: Scored) -> PromptType | TokenizedPrompt:
    """What is embedded of an input."""
    if isinstance(one, str):
        return one
    (prompt,) = await read_prompts(state, protocol.InputFields(messages=[{"role": "user", "content": list(one)}]))
    return prompt


async def _score(
    state: ServerState,
    request: protocol.PairFields,
    firsts: list[Scored],
    seconds: list[Scored],
    names: Names,
    public_id: str,
) -> tuple[list[float], protocol.PoolingUsage]:
    """The score of each pair, and what it took."""
    config = require_pooling(state)
    check_scores(config)
    if len(firsts) > limits.MAX_PROMPTS:
        raise bad_field(names[1], f"{len(firsts)} pairs; at most {limits.MAX_PROMPTS} in one request.")
    if request.truncation_side == "left":
        raise bad_field("truncation_side", "pairs are cut at the right.", "not_supported")
    _check_instruction(state, request, config)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), names[0])
    firsts = await _shortened(firsts, request.max_tokens_per_query, "max_tokens_per_query", tokenizer)
    seconds = await _shortened(seconds, request.max_tokens_per_doc, "max_tokens_per_doc", tokenizer)
    params = PoolingParams(
        task=scored_task(config),
        use_activation=activation(request),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    if config.embeds:
        once = each_once([*firsts, *seconds])
        prompts = await all_of([_prompt_of(state, one) for one in once])
        outputs = await run_pooling(state, request, prompts, params, public_id, field=names[1])
        return similarities(firsts, seconds, dict(zip(map(key_of, once), outputs, strict=True))), usage_of(outputs)
    check_texts([*firsts, *seconds], names[1])
    processor, pairs = state.engine.pooling_processor, list(zip(firsts, seconds, strict=True))
    size = _characters([*firsts, *seconds])
    has_template = state.engine.config.model.chat_template is not None
    variables = dict(request.chat_template_kwargs or {})
    if request.instruction is not None:
        variables["instruction"] = request.instruction
    template = tokenizer.template if has_template else None
    prompts = await run_sized(size, pair_prompts, processor, pairs, params, tokenizer, template, variables)
    outputs = await run_pooling(state, request, prompts, params, public_id, field=names[1])
    return [float(output.outputs.data[0]) for output in outputs], usage_of(outputs)


def _check_instruction(state: ServerState, request: protocol.PairFields, config: PoolingConfig) -> None:
    """What a template is told needs a template that joins pairs."""
    if config.embeds or state.engine.config.model.chat_template is None:
        for field in ("instruction", "chat_template_kwargs"):
            if getattr(request, field):
                message = "only a template (--chat-template) of a cross-encoder can read it; there is none here."
                raise bad_field(field, message, "not_supported")


async def _shortened(texts: list[Scored], keep: int | None, field: str, tokenizer: Tokenizer) -> list[Scored]:
    """The texts, each cut to so many tokens of its own; parts of messages as they are."""
    if not keep:
        return texts
    if keep < 0:
        raise bad_field(field, f"{field} must be a non-negative integer (0: no limit), not {keep}.")

    def cut(text: Scored) -> Scored:
        if not isinstance(text, str):
            return text
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return text if len(token_ids) <= keep else tokenizer.decode(token_ids[:keep])

    return await run_sized(_characters(texts), lambda: [cut(text) for text in texts])


def _characters(inputs: Sequence[Scored]) -> int:
    return sum(len(one) for one in inputs if isinstance(one, str))
