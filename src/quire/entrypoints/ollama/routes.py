"""Ollama's routes: those of work, and those that tell of models. Answers are streamed unless the request says no."""

import functools
import time
from typing import Any

from quire.entrypoints.http.route_tools import Endpoint, streaming_route, work_route
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.ollama import models
from quire.entrypoints.ollama.conversion import served_name
from quire.entrypoints.ollama.protocol import (
    NDJSON,
    Loaded,
    OllamaChat,
    OllamaChatAnswer,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaError,
    OllamaGenerate,
    OllamaModel,
    OllamaText,
    OllamaVector,
    OllamaVectors,
    Shown,
    Tags,
)
from quire.entrypoints.ollama.texts import (
    OllamaJob,
    OllamaStream,
    answer_ollama,
    prepare_ollama_chat,
    prepare_ollama_text,
)
from quire.entrypoints.pooling_api.inputs import answer_embeddings
from quire.entrypoints.pooling_api.pooling_protocol import EmbeddingRequest


async def _embed(state: ServerState, body: OllamaEmbed, request_id: str) -> OllamaVectors:
    """`POST /api/embed`."""
    began = time.perf_counter()
    keep = None if body.truncate is False else -1
    sizes = {"dimensions": body.dimensions, "truncate_prompt_tokens": keep}
    name, answer = await _vectors(state, body, request_id, body.input, sizes)
    return OllamaVectors(
        model=name,
        embeddings=[entry.embedding for entry in answer.data],
        total_duration=int((time.perf_counter() - began) * 1e9),
        prompt_eval_count=answer.usage.prompt_tokens,
    )


async def _embed_one(state: ServerState, body: OllamaEmbedding, request_id: str) -> OllamaVector:
    """`POST /api/embeddings`."""
    _, answer = await _vectors(state, body, request_id, body.prompt, {"truncate_prompt_tokens": -1})
    return OllamaVector(answer.data[0].embedding)


async def _vectors(
    state: ServerState, body: OllamaEmbed | OllamaEmbedding, request_id: str, texts: Any, fields: dict[str, Any]
) -> tuple[str, Any]:
    name = served_name(state, body)
    return name, await answer_embeddings(state, EmbeddingRequest(model=name, input=texts, **fields), request_id)


def _stream(job: OllamaJob) -> OllamaStream | None:
    return None if job.generation is None else OllamaStream(job)


_CHAT = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": False}
_GREEDY = {"options": {"temperature": 0, "num_predict": 32}}

_endpoint = functools.partial(Endpoint, error=OllamaError, stream_type=NDJSON.decode())

OLLAMA_WORK = (
    _endpoint(
        "/api/chat",
        streaming_route(OllamaChat, prepare_ollama_chat, _stream, answer_ollama, NDJSON),
        "Answer a conversation in Ollama's protocol, as lines of JSON; `stream: false` gives one answer.",
        body=(OllamaChat,),
        answer=OllamaChatAnswer,
        example=_CHAT | _GREEDY,
    ),
    _endpoint(
        "/api/generate",
        streaming_route(OllamaGenerate, prepare_ollama_text, _stream, answer_ollama, NDJSON),
        "Answer a prompt in Ollama's protocol, as lines of JSON; `stream: false` gives one answer.",
        body=(OllamaGenerate,),
        answer=OllamaText,
        example={"prompt": "What is 17 + 25?", "stream": False} | _GREEDY,
    ),
    _endpoint(
        "/api/embed",
        work_route(OllamaEmbed, _embed, any_type=True),
        "A vector for each text in Ollama's protocol; for servers of embedding models.",
        body=(OllamaEmbed,),
        answer=OllamaVectors,
        example={"input": ["The tower is three hundred metres tall."]},
    ),
    _endpoint(
        "/api/embeddings",
        work_route(OllamaEmbedding, _embed_one, any_type=True),
        "A vector for a text, in the older form of Ollama's protocol.",
        body=(OllamaEmbedding,),
        answer=OllamaVector,
        example={"prompt": "The tower is three hundred metres tall."},
    ),
)

_OPERATORS = "models are the operator's (`quire pull`, `quire rm`, `quire serve`)"
_GET = ("GET",)


def _refused(path: str, what: str, instead: str = _OPERATORS, methods: tuple[str, ...] = ("POST",)) -> Endpoint:
    """A route of Ollama's that changes which models there are."""
    return _endpoint(path, models.refuse(what, instead), f"Refused: {what} by a request.", methods)


OLLAMA_MODELS = (
    _endpoint("/api/tags", models.list_tags, "The served models, in Ollama's protocol.", _GET, answer=Tags),
    _endpoint("/api/ps", models.list_loaded, "The loaded models, in Ollama's protocol.", _GET, answer=Loaded),
    _endpoint("/api/version", models.show_version, "The release of Ollama whose routes these are.", _GET),
    _endpoint(
        "/api/show",
        models.show_model,
        "A served model, in Ollama's protocol.",
        body=(OllamaModel,),
        answer=Shown,
    ),
    _endpoint(
        "/api/pull",
        models.pull_model,
        "Done at once for a served model, in Ollama's protocol; no other one is fetched.",
        body=(OllamaModel,),
    ),
    _refused("/api/delete", "no model is deleted", methods=("DELETE",)),
    _refused("/api/copy", "no model is copied", "--served-model-name gives one more names"),
    _refused("/api/create", "no model is made"),
    _refused("/api/push", "no model is pushed"),
)
