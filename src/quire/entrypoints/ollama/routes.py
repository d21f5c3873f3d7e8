"""Ollama's routes: those of work, and those that tell of models. Answers are streamed unless the request says no."""

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.http.push import stream_answer
from quire.entrypoints.http.route_tools import Endpoint, Handler, json_response, public_id, read_request, state_of
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import run_while_connected
from quire.entrypoints.ollama import models
from quire.entrypoints.ollama.naming import served_name
from quire.entrypoints.ollama.protocol import (
    NDJSON,
    GenerationOptions,
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

BodyT = TypeVar("BodyT", bound=GenerationOptions)


def _text_route(kind: type[BodyT], prepare: Callable[[ServerState, BodyT, str], Awaitable[OllamaJob]]) -> Handler:
    async def handler(request: Request) -> Response:
        state = state_of(request)
        body = await read_request(request, kind, any_type=True)

        async def work() -> Response:
            with state.preparing():
                job = await prepare(state, body, public_id(request, body))
            if body.stream is not False and job.generation is not None:
                return await stream_answer(request, OllamaStream(job), content_type=NDJSON)
            return json_response(await answer_ollama(job))

        return await run_while_connected(request, work())

    return handler


async def embed(request: Request) -> Response:
    """`POST /api/embed`."""
    body = await read_request(request, OllamaEmbed, any_type=True)
    keep = None if body.truncate is False else -1
    return await run_while_connected(request, _embed(request, body, keep))


async def _embed(request: Request, body: OllamaEmbed, keep: int | None) -> Response:
    began = time.perf_counter()
    name, answer = await _vectors(request, body, body.input, dimensions=body.dimensions, truncate_prompt_tokens=keep)
    vectors = OllamaVectors(
        model=name,
        embeddings=[entry.embedding for entry in answer.data],
        total_duration=int((time.perf_counter() - began) * 1e9),
        prompt_eval_count=answer.usage.prompt_tokens,
    )
    return json_response(vectors)


async def embed_one(request: Request) -> Response:
    """`POST /api/embeddings`."""
    body = await read_request(request, OllamaEmbedding, any_type=True)

    async def work() -> Response:
        _, answer = await _vectors(request, body, body.prompt, truncate_prompt_tokens=-1)
        return json_response(OllamaVector(answer.data[0].embedding))

    return await run_while_connected(request, work())


async def _vectors(request: Request, body: OllamaEmbed | OllamaEmbedding, texts: Any, **fields: Any) -> tuple[str, Any]:
    state = state_of(request)
    name = served_name(state, body)
    asked = EmbeddingRequest(model=name, input=texts, **fields)
    return name, await answer_embeddings(state, asked, public_id(request, body))


_CHAT = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": False}
_GREEDY = {"options": {"temperature": 0, "num_predict": 32}}

_endpoint = functools.partial(Endpoint, error=OllamaError, stream_type=NDJSON.decode())

OLLAMA_WORK = (
    _endpoint(
        "/api/chat",
        _text_route(OllamaChat, prepare_ollama_chat),
        "Answer a conversation in Ollama's protocol, as lines of JSON; `stream: false` gives one answer.",
        body=(OllamaChat,),
        answer=OllamaChatAnswer,
        example=_CHAT | _GREEDY,
    ),
    _endpoint(
        "/api/generate",
        _text_route(OllamaGenerate, prepare_ollama_text),
        "Answer a prompt in Ollama's protocol, as lines of JSON; `stream: false` gives one answer.",
        body=(OllamaGenerate,),
        answer=OllamaText,
        example={"prompt": "What is 17 + 25?", "stream": False} | _GREEDY,
    ),
    _endpoint(
        "/api/embed",
        embed,
        "A vector for each text in Ollama's protocol; for servers of embedding models.",
        body=(OllamaEmbed,),
        answer=OllamaVectors,
        example={"input": ["The tower is three hundred metres tall."]},
    ),
    _endpoint(
        "/api/embeddings",
        embed_one,
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
