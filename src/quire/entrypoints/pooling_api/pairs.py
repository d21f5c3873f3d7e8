"""The routes that compare texts: `/score` and `/rerank`.

A cross-encoder reads both texts of a pair as one prompt; of an embedding model a score tells how near two
embeddings are.
"""

import time
from typing import Any

from quire.config import PoolingConfig, limits
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.prompts import require_tokenizer, run_sized
from quire.entrypoints.pooling_api import pooling_protocol as protocol
from quire.entrypoints.pooling_api.run import activation, require_pooling, run_pooling, usage_of
from quire.entrypoints.scoring import check_scores, pair_prompts, pair_texts, scored_task, similarity
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
    firsts, seconds = pair_texts(getattr(request, names[0]), getattr(request, names[1]), names)
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
    texts = [_document_text(document, index) for index, document in enumerate(request.documents)]
    queries = [request.query] * len(texts)
    scores, usage = await _score(state, request, queries, texts, ("query", "documents"), public_id)
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    results = [protocol.RankedResult(index, scores[index]) for index in order[: request.top_n or None]]
    if request.return_documents is not False:
        for result in results:
            result.document = protocol.RankedDocument(texts[result.index])
    return protocol.RerankResponse(id=f"rerank-{public_id}", model=model, usage=usage, results=results)


def _document_text(document: str | dict[str, Any], index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise bad_field(f"documents[{index}].text", "expected a string.")
    return text


async def _score(
    state: ServerState,
    request: protocol.PairFields,
    firsts: list[str],
    seconds: list[str],
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
        texts = list(dict.fromkeys([*firsts, *seconds]))  # each is embedded once, however often it is paired
        outputs = await run_pooling(state, request, texts, params, public_id, field=names[1])
        by_text = dict(zip(texts, outputs, strict=True))
        pairs = zip(firsts, seconds, strict=True)
        return [similarity(by_text[first], by_text[second]) for first, second in pairs], usage_of(outputs)
    processor, pairs = state.engine.pooling_processor, list(zip(firsts, seconds, strict=True))
    size = sum(map(len, firsts)) + sum(map(len, seconds))
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


async def _shortened(texts: list[str], keep: int | None, field: str, tokenizer: Tokenizer) -> list[str]:
    """The texts, each cut to so many tokens of its own."""
    if not keep:
        return texts
    if keep < 0:
        raise bad_field(field, f"{field} must be a non-negative integer (0: no limit), not {keep}.")

    def cut(text: str) -> str:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return text if len(token_ids) <= keep else tokenizer.decode(token_ids[:keep])

    return await run_sized(sum(map(len, texts)), lambda: [cut(text) for text in texts])
