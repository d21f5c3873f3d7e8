"""The routes: each reads its body, calls one function, and encodes what it gives.

Knows paths and methods. What the answers mean is in `chat.py`, `completions.py`, `embeddings.py`, `pooled.py`, `scores.py` and
`prompts.py`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.entrypoints.openai.chat import answer_chat, prepare_chat, stream_chat
from quire.entrypoints.openai.completions import CompletionStream, answer_completion, prepare_completion
from quire.entrypoints.openai.decoding import read_body
from quire.entrypoints.openai.embeddings import answer_embeddings
from quire.entrypoints.openai.errors import HTTPError, not_ready
from quire.entrypoints.openai.pooled import answer_classification, answer_pooling
from quire.entrypoints.openai.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.entrypoints.openai.prompts import check_token_ids, require_tokenizer, run_sized, tokenize_prompt
from quire.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from quire.entrypoints.openai.responses import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from quire.entrypoints.openai.scores import answer_rerank, answer_score
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.streaming import run_while_connected, start_event_stream
from quire.errors import EngineDeadError
from quire.version import __version__

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
PoolingT = TypeVar("PoolingT", bound=PoolingFields)
Handler = Callable[[Request], Awaitable[Response]]
_encode = msgspec.json.Encoder().encode


def json_response(body: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(_encode(body), status_code=status, media_type="application/json")


def _state(request: Request) -> ServerState:
    return request.app.state.server


def _public_id(request: Request, body: GenerationFields | PoolingFields) -> str:
    """The id that the client sees: its own (field, then header), or the one the request was given."""
    return body.request_id or str(request.scope["state"]["request_id"])


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    """The typed body of a request for work; refused before it is read while the server cannot serve."""
    state = _state(request)
    state.accept_work()
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type not in ("application/json", "text/json", "") and not content_type.endswith("+json"):
        message = f"Content-Type: {content_type[:100]!r} cannot be read; send application/json."
        raise HTTPError(400, message, code="unsupported_media_type")
    body = await read_body(request, state.settings.max_body_bytes)
    return state.decoder.decode(body, kind)


async def create_chat_completion(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    state = _state(request)
    body = await _read(request, ChatCompletionRequest)

    async def work() -> Response:
        job = await prepare_chat(state, body, _public_id(request, body))
        if body.stream:
            return await start_event_stream(stream_chat(state, job), job.public_id)
        return json_response(await answer_chat(state, job))

    return await run_while_connected(request, work())


async def create_completion(request: Request) -> Response:
    """`POST /v1/completions`."""
    state = _state(request)
    body = await _read(request, CompletionRequest)

    async def work() -> Response:
        job = await prepare_completion(state, body, _public_id(request, body))
        if body.stream:
            return await start_event_stream(CompletionStream(state, job).events(), job.public_id)
        return json_response(await answer_completion(state, job))

    return await run_while_connected(request, work())


def _pooling_route(kind: type[PoolingT], answer: Callable[[ServerState, PoolingT, str], Awaitable[Any]]) -> Handler:
    """A route of a pooling model: `answer` gives what is encoded."""

    async def handler(request: Request) -> Response:
        state = _state(request)
        body = await _read(request, kind)

        async def work() -> Response:
            return json_response(await answer(state, body, _public_id(request, body)))

        return await run_while_connected(request, work())

    return handler


create_embeddings = _pooling_route(EmbeddingRequest, answer_embeddings)
create_classification = _pooling_route(ClassificationRequest, answer_classification)
create_pooling = _pooling_route(PoolingRequest, answer_pooling)
create_score = _pooling_route(ScoreRequest, answer_score)
create_rerank = _pooling_route(RerankRequest, answer_rerank)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`."""
    state = _state(request)
    body = await _read(request, TokenizeRequest)
    state.resolve_model(body.model)
    state.check_request_template(body.chat_template)
    tokenizer = state.engine.get_tokenizer()
    token_ids = await tokenize_prompt(body, tokenizer)
    strings = None
    if body.return_token_strs:
        strings = [str(token) for token in require_tokenizer(tokenizer, "prompt").convert_ids_to_tokens(token_ids)]
    limit = state.engine.config.model.max_model_len
    return json_response(TokenizeResponse(len(token_ids), limit, token_ids, strings))


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`."""
    state = _state(request)
    body = await _read(request, DetokenizeRequest)
    state.resolve_model(body.model)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "tokens")
    if body.tokens:
        check_token_ids(body.tokens, state.engine.config.model.vocab_size, "tokens")
    return json_response(DetokenizeResponse(await run_sized(len(body.tokens), tokenizer.decode, body.tokens)))


def _model_cards(state: ServerState) -> list[ModelCard]:
    config = state.engine.config.model
    return [
        ModelCard(id=name, created=state.started_at, root=config.model, max_model_len=config.max_model_len)
        for name in state.model_names
    ]


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return json_response(ModelList(_model_cards(_state(request))))


async def get_model(request: Request) -> Response:
    """`GET /v1/models/{model}`; a name may hold slashes."""
    state = _state(request)
    name = state.resolve_model(request.path_params["model"])
    return json_response(next(card for card in _model_cards(state) if card.id == name))


async def health(request: Request) -> Response:
    """`GET /health`: 200 while the engine lives and makes progress."""
    engine = _state(request).engine
    try:
        await engine.check_health()
    except EngineDeadError:
        raise not_ready("The engine is not running.") from None
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """`GET /ready`: 200 while new requests are welcome."""
    _state(request).accept_work()
    return Response(status_code=200)


async def ping(request: Request) -> Response:
    """`GET` or `POST /ping`: `/health` under the name that hosting services use."""
    return await health(request)


async def version(request: Request) -> Response:
    """`GET /version`."""
    del request
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    """`GET /load`: requests in flight."""
    return json_response({"server_load": _state(request).in_flight})


async def metrics(request: Request) -> Response:
    """`GET /metrics`: Prometheus' text format."""
    registry = _state(request).metrics
    if registry is None:
        raise not_ready("The engine is starting; there are no metrics yet.")
    body, content_type = registry.exposition()
    return Response(body, headers={"content-type": content_type})


WORK: dict[str, Handler] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/embeddings": create_embeddings,
    "/classify": create_classification,
    "/pooling": create_pooling,
    "/score": create_score,
    "/v1/score": create_score,
    "/rerank": create_rerank,
    "/v1/rerank": create_rerank,
    "/v2/rerank": create_rerank,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
"""What is posted to be worked on: refused while the engine starts or the server drains, waited for when it drains."""

OTHERS: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/models", ("GET",), list_models),
    ("/v1/models/{model:path}", ("GET",), get_model),
    ("/health", ("GET",), health),
    ("/ready", ("GET",), ready),
    ("/ping", ("GET", "POST"), ping),
    ("/version", ("GET",), version),
    ("/load", ("GET",), load),
    ("/metrics", ("GET",), metrics),
)


def build_routes() -> list[Route]:
    """The routes as Starlette's objects; FastAPI's own route class would validate what msgspec already has."""
    routes = [Route(path, handler, methods=["POST"]) for path, handler in WORK.items()]
    return routes + [Route(path, handler, methods=list(methods)) for path, methods, handler in OTHERS]
