"""The routes of work, in one table: each reads its body, calls one function, and encodes what it gives.

Knows paths; those of operators are in `operations.py`. What the answers mean is in `chat.py`, `completions.py`,
`pooling_api/` and `prompts.py`.
"""

from collections.abc import Set

from starlette.requests import Request
from starlette.responses import Response

from quire.config import PoolingConfig
from quire.entrypoints.anthropic.messages import (
    MessageStream,
    answer_message,
    count_tokens,
    prepare_message,
    render_message,
)
from quire.entrypoints.anthropic.protocol import (
    CountTokensRequest,
    CountTokensResponse,
    MessageResponse,
    MessagesRequest,
)
from quire.entrypoints.audio import transcription_routes as audio_routes
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.http.route_tools import (
    Endpoint,
    Handler,
    json_response,
    read_bytes,
    read_request,
    state_of,
    streaming_route,
    work_route,
)
from quire.entrypoints.ollama.routes import OLLAMA_WORK
from quire.entrypoints.openai.chat import ChatStream, answer_chat, answer_chat_batch, prepare_chat
from quire.entrypoints.openai.completions import CompletionStream, answer_completion, prepare_completion
from quire.entrypoints.openai.prompts import (
    check_token_ids,
    input_processor,
    require_tokenizer,
    run_sized,
    tokenize_prompt,
)
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.entrypoints.openai.token_generation import (
    TokenStream,
    answer_tokens,
    prepare_tokens,
    render_chat,
    render_completion,
)
from quire.entrypoints.pooling_api import pooling_protocol
from quire.entrypoints.pooling_api.cohere import answer_cohere_embed
from quire.entrypoints.pooling_api.generative_scoring import answer_generative_scoring
from quire.entrypoints.pooling_api.inputs import answer_classification, answer_embeddings, answer_pooling
from quire.entrypoints.pooling_api.pairs import answer_rerank, answer_score
from quire.entrypoints.responses import handlers as responses_api
from quire.tokenizers.interface import Tokenizer

create_chat_completion = streaming_route(ChatCompletionRequest, prepare_chat, ChatStream, answer_chat)
create_completion = streaming_route(CompletionRequest, prepare_completion, CompletionStream, answer_completion)
create_message = streaming_route(MessagesRequest, prepare_message, MessageStream, answer_message)
create_tokens = streaming_route(GenerateRequest, prepare_tokens, TokenStream, answer_tokens)
create_chat_batch = work_route(BatchChatRequest, answer_chat_batch)
create_generative_scoring = work_route(GenerativeScoringRequest, answer_generative_scoring)
count_message_tokens = work_route(CountTokensRequest, count_tokens)
create_embeddings = work_route(pooling_protocol.EmbeddingRequest, answer_embeddings)
create_cohere_embeddings = work_route(pooling_protocol.CohereEmbedRequest, answer_cohere_embed)
create_classification = work_route(pooling_protocol.ClassificationRequest, answer_classification)
create_pooling = work_route(pooling_protocol.PoolingRequest, answer_pooling)
create_score = work_route(pooling_protocol.ScoreRequest, answer_score)
create_rerank = work_route(pooling_protocol.RerankRequest, answer_rerank)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`."""
    state = state_of(request)
    body = await read_request(request, TokenizeRequest)
    state.resolve_model(body.model)
    state.check_request_template(body.chat_template)
    tokenizer = state.engine.get_tokenizer()
    variables = state.settings.default_chat_template_kwargs
    token_ids = await tokenize_prompt(body, tokenizer, variables, input_processor(state))
    strings = None
    if body.return_token_strs:
        named = require_tokenizer(tokenizer, "prompt")
        strings = await run_sized(len(token_ids), _token_strings, named, token_ids)
    limit = state.engine.config.model.max_model_len
    return json_response(TokenizeResponse(len(token_ids), limit, token_ids, strings))


def _token_strings(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(token_ids)]


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`."""
    state = state_of(request)
    body = await read_request(request, DetokenizeRequest)
    state.resolve_model(body.model)
    tokenizer = require_tokenizer(state.engine.get_tokenizer(), "tokens")
    if body.tokens:
        check_token_ids(body.tokens, state.engine.tokenizer_source.num_tokens(), "tokens")
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


_QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
_QUESTIONS = [[{"role": "user", "content": f"What is {number} + 25?"}] for number in (17, 18)]
_GREEDY = {"max_tokens": 32, "temperature": 0}
_TEXTS = ["The tower is three hundred metres tall."]
_DOCUMENTS = ["Three hundred metres.", "I like rivers."]
_RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

WORK = (
    Endpoint(
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation; `stream: true` gives server-sent events.",
        body=(ChatCompletionRequest,),
        answer=ChatCompletionResponse,
        example=_QUESTION | _GREEDY,
    ),
    Endpoint(
        "/v1/chat/completions/batch",
        create_chat_batch,
        "Answer several conversations at once.",
        body=(BatchChatRequest,),
        answer=ChatCompletionResponse,
        example={"messages": _QUESTIONS, "max_tokens": 32},
    ),
    Endpoint(
        "/v1/completions",
        create_completion,
        "Continue a prompt; `stream: true` gives server-sent events.",
        body=(CompletionRequest,),
        answer=CompletionResponse,
        example={"prompt": "one two three", "max_tokens": 16, "temperature": 0},
    ),
    Endpoint(
        "/generative_scoring",
        create_generative_scoring,
        "How likely a token is to come next, behind a query with each of several items.",
        body=(GenerativeScoringRequest,),
        answer=GenerativeScoringResponse,
        example={"query": "Is this a river? ", "items": ["The Rhine", "A chair"], "label_token_ids": [1, 2]},
    ),
    Endpoint(
        "/inference/v1/generate",
        create_tokens,
        "Token ids in, token ids out; `stream: true` gives server-sent events.",
        body=(GenerateRequest,),
        answer=GenerateResponse,
        example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16, "temperature": 0}},
    ),
    Endpoint(
        "/v1/chat/completions/render",
        work_route(ChatCompletionRequest, render_chat),
        "What /inference/v1/generate would be sent for a conversation; runs nothing.",
        body=(ChatCompletionRequest,),
        answer=GenerateRequest,
        example=_QUESTION | _GREEDY,
    ),
    Endpoint(
        "/v1/completions/render",
        work_route(CompletionRequest, render_completion),
        "What /inference/v1/generate would be sent for each prompt; runs nothing.",
        body=(CompletionRequest,),
        answer=list[GenerateRequest],
        example={"prompt": "one two three", "max_tokens": 16, "temperature": 0},
    ),
    Endpoint(
        "/v1/messages/render",
        work_route(MessagesRequest, render_message),
        "What /inference/v1/generate would be sent for a conversation in Anthropic's protocol; runs nothing.",
        body=(MessagesRequest,),
        answer=GenerateRequest,
        example=_QUESTION | _GREEDY,
    ),
    *responses_api.WORK,
    *audio_routes.WORK,
    Endpoint(
        "/v1/messages",
        create_message,
        "Answer a conversation in Anthropic's protocol; `stream: true` gives its events.",
        body=(MessagesRequest,),
        answer=MessageResponse,
        example=_QUESTION | _GREEDY,
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        count_message_tokens,
        "How many tokens a request to /v1/messages has.",
        body=(CountTokensRequest,),
        answer=CountTokensResponse,
        example=_QUESTION,
    ),
    *OLLAMA_WORK,
    Endpoint(
        "/v1/embeddings",
        create_embeddings,
        "A vector for each input; for servers of embedding models.",
        body=(pooling_protocol.EmbeddingRequest,),
        answer=pooling_protocol.EmbeddingResponse,
        example={"input": _TEXTS},
    ),
    Endpoint(
        "/v2/embed",
        create_cohere_embeddings,
        "A vector for each text, as Cohere's clients ask for it; for servers of embedding models.",
        body=(pooling_protocol.CohereEmbedRequest,),
        answer=pooling_protocol.CohereEmbedResponse,
        example={"texts": _TEXTS, "input_type": "search_document"},
    ),
    Endpoint(
        "/classify",
        create_classification,
        "The probability of each class, for every input; for servers of classifiers.",
        body=(pooling_protocol.ClassificationRequest,),
        answer=pooling_protocol.ClassificationResponse,
        example={"input": ["A fine film."]},
    ),
    Endpoint(
        "/pooling",
        create_pooling,
        "What the pooler gives for every input, of any task that the model has.",
        body=(pooling_protocol.PoolingRequest,),
        answer=pooling_protocol.PoolingResponse,
        example={"input": ["A fine film."]},
    ),
    *(
        Endpoint(
            path,
            create_score,
            "How well pairs of texts match.",
            body=(pooling_protocol.ScoreRequest,),
            answer=pooling_protocol.ScoreResponse,
            example={"text_1": "How tall is the tower?", "text_2": _DOCUMENTS},
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(
            path,
            create_rerank,
            "Documents in the order in which they fit a query.",
            body=(pooling_protocol.RerankRequest,),
            answer=pooling_protocol.RerankResponse,
            example={"query": "How tall is the tower?", "documents": _DOCUMENTS, "top_n": 1},
        )
        for path in _RERANK_PATHS
    ),
    Endpoint(
        "/tokenize",
        tokenize,
        "Token ids of a prompt or of messages.",
        body=(TokenizeRequest,),
        answer=TokenizeResponse,
        example={"prompt": "Hello"},
    ),
    Endpoint(
        "/detokenize",
        detokenize,
        "The text of token ids.",
        body=(DetokenizeRequest,),
        answer=DetokenizeResponse,
        example={"tokens": [1, 2, 3]},
    ),
    Endpoint(
        "/invocations",
        invoke,
        "Any of the bodies above: the route is chosen by its fields.",
        body=(
            ChatCompletionRequest,
            CompletionRequest,
            pooling_protocol.EmbeddingRequest,
            pooling_protocol.ClassificationRequest,
            pooling_protocol.PoolingRequest,
            pooling_protocol.ScoreRequest,
            pooling_protocol.RerankRequest,
        ),
        example=_QUESTION | _GREEDY,
    ),
)
"""What is posted to be worked on: refused while the engine starts or the server drains, waited for when it drains."""
