"""The routes of work: each reads its body, calls one function, and encodes what it gives.

Knows paths; those of operators are in `operations.py`. What the answers mean is in `chat.py`, `completions.py`,
`pooled.py` and `prompts.py`.
"""

from collections.abc import Awaitable, Callable, Set
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import envs
from quire.config import PoolingConfig
from quire.entrypoints.anthropic.messages import MessageStream, answer_message, count_tokens, prepare_message
from quire.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.entrypoints.openai import pooling_protocol
from quire.entrypoints.openai.chat import ChatStream, answer_chat, answer_chat_batch, prepare_chat
from quire.entrypoints.openai.completions import CompletionStream, answer_completion, prepare_completion
from quire.entrypoints.openai.errors import bad_request
from quire.entrypoints.openai.generative_scoring import answer_generative_scoring
from quire.entrypoints.openai.operations import DEV_ROUTES, OPERATIONS
from quire.entrypoints.openai.pooled import (
    answer_classification,
    answer_cohere_embed,
    answer_embeddings,
    answer_pooling,
    answer_rerank,
    answer_score,
)
from quire.entrypoints.openai.prompts import check_token_ids, require_tokenizer, run_sized, tokenize_prompt
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerativeScoringRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.entrypoints.openai.push import AnswerStream, stream_answer
from quire.entrypoints.openai.route_tools import (
    Handler,
    RequestWithId,
    json_response,
    public_id,
    read_bytes,
    read_request,
    state_of,
)
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.streaming import run_while_connected
from quire.entrypoints.openai.token_generation import TokenStream, answer_tokens, prepare_tokens
from quire.entrypoints.openai.token_protocol import GenerateRequest
from quire.entrypoints.responses_api import handlers as responses_api

BodyT = TypeVar("BodyT", bound=RequestWithId)


def _streaming_route(
    kind: type[Any],
    prepare: Callable[[ServerState, Any, str], Awaitable[Any]],
    stream: Callable[[ServerState, Any], AnswerStream],
    answer: Callable[[ServerState, Any], Awaitable[Any]],
) -> Handler:
    """A route whose body becomes a job, which is answered whole or as a stream."""

    async def handler(request: Request) -> Response:
        state = state_of(request)
        body = await read_request(request, kind)

        async def work() -> Response:
            job = await prepare(state, body, public_id(request, body))
            if body.stream:
                return await stream_answer(request, stream(state, job), state.settings.sse_keep_alive_interval)
            return json_response(await answer(state, job))

        return await run_while_connected(request, work())

    return handler


def _route(kind: type[BodyT], answer: Callable[[ServerState, BodyT, str], Awaitable[Any]]) -> Handler:
    """A route that never streams: `answer` gives what is encoded."""

    async def handler(request: Request) -> Response:
        state = state_of(request)
        body = await read_request(request, kind)

        async def work() -> Response:
            answered = await answer(state, body, public_id(request, body))
            return answered if isinstance(answered, Response) else json_response(answered)

        return await run_while_connected(request, work())

    return handler


create_chat_completion = _streaming_route(ChatCompletionRequest, prepare_chat, ChatStream, answer_chat)
create_completion = _streaming_route(CompletionRequest, prepare_completion, CompletionStream, answer_completion)
create_message = _streaming_route(MessagesRequest, prepare_message, MessageStream, answer_message)
create_tokens = _streaming_route(GenerateRequest, prepare_tokens, TokenStream, answer_tokens)
create_chat_batch = _route(BatchChatRequest, answer_chat_batch)
create_generative_scoring = _route(GenerativeScoringRequest, answer_generative_scoring)
count_message_tokens = _route(CountTokensRequest, count_tokens)
create_embeddings = _route(pooling_protocol.EmbeddingRequest, answer_embeddings)
create_cohere_embeddings = _route(pooling_protocol.CohereEmbedRequest, answer_cohere_embed)
create_classification = _route(pooling_protocol.ClassificationRequest, answer_classification)
create_pooling = _route(pooling_protocol.PoolingRequest, answer_pooling)
create_score = _route(pooling_protocol.ScoreRequest, answer_score)
create_rerank = _route(pooling_protocol.RerankRequest, answer_rerank)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`."""
    state = state_of(request)
    body = await read_request(request, TokenizeRequest)
    state.resolve_model(body.model)
    state.check_request_template(body.chat_template)
    tokenizer = state.engine.get_tokenizer()
    token_ids = await tokenize_prompt(body, tokenizer, state.settings.default_chat_template_kwargs)
    strings = None
    if body.return_token_strs:
        strings = [str(token) for token in require_tokenizer(tokenizer, "prompt").convert_ids_to_tokens(token_ids)]
    limit = state.engine.config.model.max_model_len
    return json_response(TokenizeResponse(len(token_ids), limit, token_ids, strings))


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`."""
    state = state_of(request)
    body = await read_request(request, DetokenizeRequest)
    state.resolve_model(body.model)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "tokens")
    if body.tokens:
        check_token_ids(body.tokens, state.engine.config.model.vocab_size, "tokens")
    return json_response(DetokenizeResponse(await run_sized(len(body.tokens), tokenizer.decode, body.tokens)))


async def invoke(request: Request) -> Response:
    """`POST /invocations`: the route that a body's fields belong to, under the one name that hosting services use."""
    state = state_of(request)
    state.accept_work()
    fields = state.decoder.field_names(await read_bytes(request))
    return await _invoked(fields, state.engine.config.model.pooling)(request)


def _invoked(fields: Set[str], pooling: PoolingConfig | None) -> Handler:
    if "prompt" in fields:
        return create_completion
    if "query" in fields:
        return create_rerank
    if fields & {"text_1", "data_1", "queries"}:
        return create_score
    if pooling is None and "messages" in fields:
        return create_chat_completion
    if not fields & {"input", "messages"}:
        raise bad_request("The request body has none of: messages, prompt, input, query, text_1, data_1, queries.")
    if pooling is None or pooling.embeds:
        return create_embeddings
    return create_classification if "classify" in pooling.tasks else create_pooling


WORK: dict[str, Handler] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/chat/completions/batch": create_chat_batch,
    "/v1/completions": create_completion,
    "/generative_scoring": create_generative_scoring,
    "/inference/v1/generate": create_tokens,
    **responses_api.WORK,
    "/v1/messages": create_message,
    "/v1/messages/count_tokens": count_message_tokens,
    "/v1/embeddings": create_embeddings,
    "/v2/embed": create_cohere_embeddings,
    "/classify": create_classification,
    "/pooling": create_pooling,
    "/score": create_score,
    "/v1/score": create_score,
    "/rerank": create_rerank,
    "/v1/rerank": create_rerank,
    "/v2/rerank": create_rerank,
    "/invocations": invoke,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
"""What is posted to be worked on: refused while the engine starts or the server drains, waited for when it drains."""


def build_routes() -> list[Route]:
    """The routes as Starlette's objects; FastAPI's own route class would validate what msgspec already has."""
    routes = [Route(path, handler, methods=["POST"]) for path, handler in WORK.items()]
    others = (*OPERATIONS, *(DEV_ROUTES if envs.QUIRE_SERVER_DEV_MODE else ()))
    return routes + [Route(path, handler, methods=list(methods)) for path, methods, handler in others]
