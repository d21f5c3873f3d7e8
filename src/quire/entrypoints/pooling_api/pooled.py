"""The routes of pooling models: `/v1/embeddings`, `/v2/embed` (Cohere's), `/classify`, `/pooling`, `/score` and `/rerank`.

Inputs become prompts, prompts run in the engine, and what it gives is written in each route's form. A cross-encoder reads both
texts of a pair as one prompt; of an embedding model a score is the cosine of two embeddings. Cohere's types: `float`, `base64`
of little-endian float32, and a bit a dimension, eight to a byte (`binary`, `ubinary`); numbers of eight bits need ranges that
were measured for a model, which no checkpoint holds.
"""

import base64
import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from quire.config import PoolingConfig, limits
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.pooling_processor import join_pieces
from quire.entrypoints.http.errors import TOO_LONG, bad_field, bad_request, error_of_finished
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.prompts import listed, render_chat, require_tokenizer, run_sized
from quire.entrypoints.pooling_api import pooling_protocol as protocol
from quire.entrypoints.pooling_api.number_formats import to_bytes
from quire.entrypoints.pooling_api.pooling_protocol import CohereEmbedRequest, CohereEmbedResponse, CohereMeta
from quire.entrypoints.scoring import check_scores, cosine, join_pairs, pair_texts, render_pairs
from quire.errors import RequestError, TooLongError
from quire.guards import is_dict, is_sequence
from quire.inputs import PromptType, TextPrompt, TokensPrompt
from quire.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.tokenizers.interface import Tokenizer

Pooled = PoolingRequestOutput[PoolingOutput]
_MOST_METADATA = 60_000
"""Bytes of a header that clients still read: Python's own takes a line of 65,536."""


def require_pooling(state: ServerState) -> PoolingConfig:
    """How the model pools; a 400 where it generates."""
    model = state.engine.config.model
    if model.pooling is None:
        message = (
            f"{model.model!r} generates text here and cannot embed, classify or score: start the server with "
            "--runner pooling (and --convert embed or classify)."
        )
        raise bad_request(message, "model", "not_supported")
    return model.pooling


def activation(request: protocol.PoolingFields, normalize: bool | None = None) -> bool | None:
    """`use_activation`, under any of its names."""
    values = (request.use_activation, request.activation, normalize)
    return next((value for value in values if value is not None), None)


async def read_prompts(state: ServerState, request: protocol.InputFields) -> list[PromptType]:
    """The inputs: a text, texts, token ids, lists of token ids; or a conversation."""
    if (request.input is None) == (request.messages is None):
        raise bad_field("input", "this field is required (or messages, but not both).", "missing_field")
    if request.messages is not None:
        return [await _conversation(state, request, request.messages)]
    items = listed(request.input, "input", "inputs")
    if any(isinstance(item, int) for item in items):
        raise bad_field("input", "a list mixes token ids with texts or lists.")
    return [_prompt(item, request.cache_salt) for item in items]


def _prompt(item: str | list[int], cache_salt: str | None) -> PromptType:
    prompt: TextPrompt | TokensPrompt
    prompt = TextPrompt(prompt=item) if isinstance(item, str) else TokensPrompt(prompt_token_ids=item)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


async def _conversation(
    state: ServerState, request: protocol.InputFields, messages: list[dict[str, Any]]
) -> PromptType:
    state.check_request_template(request.chat_template)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "messages")
    variables = dict(request.chat_template_kwargs or {})
    prompt = await render_chat(request, messages, tokenizer, variables, bool(request.add_generation_prompt))
    return _prompt(prompt.token_ids, request.cache_salt)


async def run_pooling(
    state: ServerState,
    request: protocol.PoolingFields | protocol.CohereEmbedRequest,
    prompts: Sequence[PromptType | TokenizedPrompt],
    params: PoolingParams,
    public_id: str,
    *,
    field: str = "input",
    add_special_tokens: bool = True,
) -> list[Pooled]:
    """The pooler's output for each prompt. One that fails cancels the others, and its error is the request's. `field`: named
    where a prompt cannot be served."""
    options, priority = {"add_special_tokens": add_special_tokens}, request.priority or 0
    processor = state.engine.pooling_processor

    async def run(prompt: PromptType | TokenizedPrompt) -> Pooled:
        if not processor.config.in_pieces and not processor.config.max_embed_len:
            return await run_piece(prompt)
        if not isinstance(prompt, TokenizedPrompt):
            size = processor.num_characters(prompt)
            (prompt,) = await run_sized(size, processor.tokenize_batch, [prompt], add_special_tokens)
        try:
            pieces = processor.pieces(prompt, params)
        except TooLongError as error:
            raise bad_field(field, str(error), TOO_LONG) from None
        return join_pieces(await all_of([run_piece(piece) for piece in pieces]))

    async def run_piece(prompt: PromptType | TokenizedPrompt) -> Pooled:
        request_id = state.engine_request_id(public_id)
        outputs = state.engine.encode(prompt, params, request_id, priority=priority, tokenization_kwargs=options)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    return output
        except RequestError as error:
            if error.param in ("prompt", "prompt_token_ids"):
                raise bad_field(field, str(error), TOO_LONG if isinstance(error, TooLongError) else None) from None
            raise
        raise error_of_finished(None, public_id)

    return await all_of([run(prompt) for prompt in prompts])


async def run_inputs(state: ServerState, request: protocol.InputFields, public_id: str, **wanted: Any) -> list[Pooled]:
    """The pooler's output for each input of a request, whose parameters are these and what every such request says."""
    shared = {name: getattr(request, name) for name in ("truncate_prompt_tokens", "truncation_side")}
    normalize = getattr(request, "normalize", None)
    params = PoolingParams(use_activation=activation(request, normalize), **shared, **wanted)
    if not isinstance(request, protocol.EmbeddingRequest):
        _check_task(state, params.task or require_pooling(state).tasks[0])
    prompts, special = await read_prompts(state, request), request.add_special_tokens is not False
    return await run_pooling(state, request, prompts, params, public_id, add_special_tokens=special)


def usage_of(outputs: Sequence[Pooled]) -> protocol.PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return protocol.PoolingUsage(count, count)


def numbers(pooled: PoolingOutput, request: protocol.EncodedFields) -> Any:
    """A vector or rows as JSON's numbers, or as base64 of their bytes."""
    if request.encoding_format == "base64":
        return base64.b64encode(_as_bytes(pooled, request)).decode()
    return pooled.data.tolist()


def _as_bytes(pooled: PoolingOutput, request: protocol.EncodedFields) -> bytes:
    return to_bytes(pooled.data, request.embed_dtype or "float32", request.endianness or "little")


def binary_response(
    outputs: Sequence[Pooled], request: protocol.EncodedFields, answer_id: str, model: str
) -> Response | None:
    """All inputs' bytes, one behind the other; `bytes` tells in the header `metadata` where each lies. None of another format."""
    if request.encoding_format not in ("bytes", "bytes_only"):
        return None
    pieces = [_as_bytes(output.outputs, request) for output in outputs]
    headers: dict[str, str] = {}
    if request.encoding_format == "bytes":
        ends = list(itertools.accumulate(map(len, pieces)))
        told = {"embed_dtype": request.embed_dtype or "float32", "endianness": request.endianness or "little"}
        data = [
            {"index": index, **told, "start": end - len(piece), "end": end, "shape": output.outputs.data.shape}
            for index, (piece, end, output) in enumerate(zip(pieces, ends, outputs, strict=True))
        ]
        metadata = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": msgspec.to_builtins(usage_of(outputs)),
        }
        headers["metadata"] = json.dumps(metadata, separators=(",", ":"))
        if len(headers["metadata"]) > _MOST_METADATA:
            message = (
                f"'bytes' describes {len(outputs)} inputs in a header of {len(headers['metadata'])} bytes; at "
                f"most {_MOST_METADATA}: send fewer, or take 'bytes_only'."
            )
            raise bad_field("encoding_format", message)
    return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")


async def answer_embeddings(
    state: ServerState, request: protocol.EmbeddingRequest, public_id: str
) -> protocol.EmbeddingResponse | Response:
    model = state.resolve_model(request.model)
    require_pooling(state)
    outputs = await run_inputs(state, request, public_id, task="embed", dimensions=request.dimensions)
    if (binary := binary_response(outputs, request, f"embd-{public_id}", model)) is not None:
        return binary
    data = [protocol.EmbeddingData(index, numbers(output.outputs, request)) for index, output in enumerate(outputs)]
    return protocol.EmbeddingResponse(data=data, **_head("embd", public_id, model, usage_of(outputs)))


def _head(kind: str, public_id: str, model: str, usage: protocol.PoolingUsage) -> dict[str, Any]:
    """What most answers have in common."""
    return {"id": f"{kind}-{public_id}", "created": int(time.time()), "model": model, "usage": usage}


async def answer_classification(
    state: ServerState, request: protocol.ClassificationRequest, public_id: str
) -> protocol.ClassificationResponse:
    """The probability of each class, for every input."""
    model = state.resolve_model(request.model)
    outputs = await run_inputs(state, request, public_id, task="classify")
    labels = _labels(state)
    data: list[protocol.ClassificationData] = []
    for index, output in enumerate(outputs):
        probs: list[float] = output.outputs.data.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append(protocol.ClassificationData(index, labels.get(best, f"LABEL_{best}"), probs, len(probs)))
    return protocol.ClassificationResponse(data=data, **_head("classify", public_id, model, usage_of(outputs)))


def _labels(state: ServerState) -> dict[int, str]:
    """Names of classes, by number, where config.json has them; its keys are texts."""
    named: Any = state.engine.config.model.hf_config.to_dict().get("id2label") or {}
    return {int(key): str(name) for key, name in named.items()}


def _check_task(state: ServerState, task: str) -> None:
    pooling = require_pooling(state)
    if task not in pooling.tasks:
        message = (
            f"{state.engine.config.model.model!r} runs as {pooling.convert!r} and cannot do {task!r}; "
            f"it can: {', '.join(pooling.tasks)}."
        )
        raise bad_request(message, "task", "not_supported")


async def answer_pooling(
    state: ServerState, request: protocol.PoolingRequest, public_id: str
) -> protocol.PoolingResponse | Response:
    """What the pooler gives for every input, of any task that the model has."""
    model = state.resolve_model(request.model)
    named = {name: getattr(request, name) for name in ("task", "dimensions", "step_tag_id", "returned_token_ids")}
    outputs = await run_inputs(state, request, public_id, **named)
    if (binary := binary_response(outputs, request, f"pooling-{public_id}", model)) is not None:
        return binary
    data = [protocol.PoolingData(index, numbers(output.outputs, request)) for index, output in enumerate(outputs)]
    return protocol.PoolingResponse(data=data, **_head("pooling", public_id, model, usage_of(outputs)))


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
    return protocol.ScoreResponse(data=data, **_head("score", public_id, model, usage))


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
        task="embed" if config.embeds else "classify",
        use_activation=activation(request),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    if config.embeds:
        texts = list(dict.fromkeys([*firsts, *seconds]))  # each is embedded once, however often it is paired
        outputs = await run_pooling(state, request, texts, params, public_id, field=names[1])
        by_text = dict(zip(texts, outputs, strict=True))
        pairs = zip(firsts, seconds, strict=True)
        return [cosine(by_text[first], by_text[second]) for first, second in pairs], usage_of(outputs)
    prompts = await _pair_prompts(state, request, firsts, seconds, params)
    outputs = await run_pooling(state, request, prompts, params, public_id, field=names[1])
    return [float(output.outputs.data[0]) for output in outputs], usage_of(outputs)


def _check_instruction(state: ServerState, request: protocol.PairFields, config: PoolingConfig) -> None:
    """What a template is told needs a template that joins pairs."""
    if config.embeds or state.engine.config.model.chat_template is None:
        for field in ("instruction", "chat_template_kwargs"):
            if getattr(request, field):
                message = "only a template (--chat-template) of a cross-encoder can read it; there is none here."
                raise bad_field(field, message, "not_supported")


async def _pair_prompts(
    state: ServerState,
    request: protocol.PairFields,
    firsts: list[str],
    seconds: list[str],
    params: PoolingParams,
) -> list[Any]:
    """A prompt for each pair, written by the operator's template where there is one (`--chat-template`)."""
    engine, pairs = state.engine, list(zip(firsts, seconds, strict=True))
    size = sum(map(len, firsts)) + sum(map(len, seconds))
    tokenizer: Any = engine.get_tokenizer()
    if engine.config.model.chat_template is not None:
        variables = dict(request.chat_template_kwargs or {})
        if request.instruction is not None:
            variables["instruction"] = request.instruction
        template = tokenizer.template
        return await run_sized(size, render_pairs, engine.pooling_processor, tokenizer, template, pairs, variables)
    return await run_sized(size, join_pairs, engine.pooling_processor, pairs, params)


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


_SIDES: dict[str, str | None] = {"END": "right", "START": "left", "NONE": None}
_PROMPTS = {"search_query": ("search_query", "query"), "search_document": ("search_document", "document", "passage")}
_TYPES = ("float", "base64", "binary", "ubinary")
_INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
"""What Cohere's clients may say that a text is for."""


async def answer_cohere_embed(state: ServerState, request: CohereEmbedRequest, public_id: str) -> CohereEmbedResponse:
    """Embed every text of a request, behind the model's prompt for such inputs where it has one."""
    state.resolve_model(request.model)
    config = require_pooling(state)
    kinds, texts = _kinds(request), _texts(request)
    side = _SIDES.get(request.truncate or "END", "")
    if side == "":
        raise bad_field("truncate", f"{str(request.truncate)[:60]!r} is unknown; allowed: {', '.join(_SIDES)}.")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise bad_field("max_tokens", f"{request.max_tokens} is out of range; at least 1.")
    limit = state.engine.config.model.max_model_len
    processor, name = state.engine.pooling_processor, _prompt_name(config, request.input_type)
    prompts = await run_sized(sum(map(len, texts)), processor.tokenize_batch, texts, True, name)
    try:
        params = PoolingParams(
            task="embed",
            dimensions=request.output_dimension,
            truncate_prompt_tokens=None if side is None else min(request.max_tokens or limit, limit),
            truncation_side=side,
        )
        outputs = await run_pooling(state, request, prompts, params, public_id, field="texts")
    except RequestError as error:
        if error.param == "dimensions":
            raise bad_field("output_dimension", str(error)) from None
        raise
    return CohereEmbedResponse(
        id=public_id,
        embeddings={kind: [_written(output.outputs.data, kind) for output in outputs] for kind in kinds},
        texts=texts,
        meta=CohereMeta({"version": "2"}, {"input_tokens": usage_of(outputs).prompt_tokens, "image_tokens": 0}),
    )


def _kinds(request: CohereEmbedRequest) -> list[str]:
    kinds = list(dict.fromkeys(request.embedding_types or ["float"]))
    for index, kind in enumerate(kinds):
        if kind not in _TYPES:
            message = f"embedding_types[{index}]: {kind[:60]!r} is not available; allowed: {', '.join(_TYPES)}."
            raise bad_request(message, "embedding_types", "not_supported")
    return kinds


def _texts(request: CohereEmbedRequest) -> list[str]:
    if request.images:
        raise bad_field("images", "this model reads texts only.", "not_supported")
    if (request.texts is None) == (request.inputs is None):
        raise bad_field("texts", "this field is required (or inputs, but not both).", "missing_field")
    field = "inputs" if request.texts is None else "texts"
    texts = (
        request.texts
        if request.texts is not None
        else [_input_text(one, i) for i, one in enumerate(request.inputs or ())]
    )
    if not 0 < len(texts) <= limits.MAX_PROMPTS:
        raise bad_field(field, f"{len(texts)} texts; 1 to {limits.MAX_PROMPTS} in one request.")
    return texts


def _input_text(given: dict[str, Any], index: int) -> str:
    """The text parts of an input, joined."""
    path, parts = f"inputs[{index}].content", given.get("content")
    if not is_sequence(parts) or not parts:
        raise bad_field(path, "expected a list of at least one part.")
    texts: list[str] = []
    for number, part in enumerate(parts):
        text = part.get("text") if is_dict(part) and part.get("type") == "text" else None
        if not isinstance(text, str):
            message = "this model reads parts of type 'text' only, with a text."
            raise bad_field(f"{path}[{number}]", message, "not_supported")
        texts.append(text)
    return "".join(texts)


def _prompt_name(config: PoolingConfig, input_type: str | None) -> str | None:
    """The model's prompt for such inputs, if it has one. Raises HTTPError: 400, neither Cohere nor the model knows the type."""
    if input_type is not None and input_type not in _INPUT_TYPES and input_type not in config.prompts:
        allowed = ", ".join(sorted({*_INPUT_TYPES, *config.prompts}))
        raise bad_field("input_type", f"Unsupported input_type {input_type[:60]!r}. Supported values: {allowed}.")
    return next((name for name in _PROMPTS.get(input_type or "", (input_type,)) if name in config.prompts), None)


def _written(vector: Any, kind: str) -> Any:
    match kind:
        case "float":
            return vector.tolist()
        case "base64":
            return base64.b64encode(to_bytes(vector, "float32", "little")).decode()
        case _:
            bits = np.packbits(vector > 0)
            return bits.tolist() if kind == "ubinary" else (bits.astype(np.int16) - 128).tolist()
