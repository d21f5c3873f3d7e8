"""Cohere's route: `POST /v2/embed`.

Its types are `float`, `base64` of little-endian float32, and a bit a dimension, eight to a byte (`binary`, `ubinary`); numbers of
eight bits need ranges that were measured for a model, which no checkpoint holds.
"""

import base64
from typing import Any

import numpy as np

from quire.config import PoolingConfig, limits
from quire.entrypoints.http.errors import bad_field, bad_request, one_of
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.prompts import run_sized
from quire.entrypoints.pooling_api.number_formats import to_bytes
from quire.entrypoints.pooling_api.pooling_protocol import CohereEmbedRequest, CohereEmbedResponse, CohereMeta
from quire.entrypoints.pooling_api.run import require_pooling, run_pooling, usage_of
from quire.errors import RequestError
from quire.guards import is_dict, is_sequence
from quire.pooling_params import PoolingParams

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
    side = _SIDES[one_of(request.truncate or "END", _SIDES, "truncate")]
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
