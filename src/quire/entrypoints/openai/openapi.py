"""The OpenAPI document, written from the msgspec structs that the server really reads and answers with."""

import re
from typing import Any

import msgspec

from quire.entrypoints.anthropic import protocol as anthropic
from quire.entrypoints.openai import pooling_protocol as pooling
from quire.entrypoints.openai import protocol
from quire.entrypoints.openai import token_protocol as tokens
from quire.entrypoints.openai.errors import ErrorResponse, openapi_error_responses
from quire.entrypoints.responses_api import protocol as kept
from quire.version import __version__

_DOCUMENTS = ["Three hundred metres.", "I like rivers."]
_SCORE: dict[str, Any] = {"text_1": "How tall is the tower?", "text_2": _DOCUMENTS}
_RERANK: dict[str, Any] = {"query": "How tall is the tower?", "documents": _DOCUMENTS, "top_n": 1}

_QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
_QUESTIONS = [[{"role": "user", "content": f"What is {number} + 25?"}] for number in (17, 18)]
_GREEDY = {"max_tokens": 32, "temperature": 0}
_TEXTS = ["The tower is three hundred metres tall."]

_WORK: tuple[tuple[str, str, type, type, dict[str, Any]], ...] = (
    ("/v1/chat/completions", "Answer a conversation; `stream: true` gives server-sent events.",
     protocol.ChatCompletionRequest, protocol.ChatCompletionResponse, _QUESTION | _GREEDY),
    ("/v1/chat/completions/batch", "Answer several conversations at once.",
     protocol.BatchChatRequest, protocol.ChatCompletionResponse, {"messages": _QUESTIONS, "max_tokens": 32}),
    ("/generative_scoring", "How likely a token is to come next, behind a query with each of several items.",
     protocol.GenerativeScoringRequest, protocol.GenerativeScoringResponse,
     {"query": "Is this a river? ", "items": ["The Rhine", "A chair"], "label_token_ids": [1, 2]}),
    ("/inference/v1/generate", "Token ids in, token ids out; `stream: true` gives server-sent events.",
     tokens.GenerateRequest, tokens.GenerateResponse,
     {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16, "temperature": 0}}),
    ("/v1/completions", "Continue a prompt; `stream: true` gives server-sent events.",
     protocol.CompletionRequest, protocol.CompletionResponse,
     {"prompt": "one two three", "max_tokens": 16, "temperature": 0}),
    ("/v1/responses",
     "Answer, and remember: `previous_response_id` goes on from an earlier response; `stream: true` gives OpenAI's events.",
     kept.ResponsesRequest, kept.ResponseObject,
     {"input": "What is 17 + 25?", "max_output_tokens": 32, "temperature": 0}),
    ("/v1/responses/input_tokens", "How many tokens a request to /v1/responses has.",
     kept.InputTokensRequest, kept.InputTokensResponse, {"input": "What is 17 + 25?"}),
    ("/v1/messages", "Answer a conversation in Anthropic's protocol; `stream: true` gives its events.",
     anthropic.MessagesRequest, anthropic.MessageResponse, _QUESTION | _GREEDY),
    ("/v1/messages/count_tokens", "How many tokens a request to /v1/messages has.",
     anthropic.CountTokensRequest, anthropic.CountTokensResponse, _QUESTION),
    ("/v1/embeddings", "A vector for each input; for servers of embedding models.",
     pooling.EmbeddingRequest, pooling.EmbeddingResponse, {"input": _TEXTS}),
    ("/v2/embed", "A vector for each text, in the form of Cohere's clients; for servers of embedding models.",
     pooling.CohereEmbedRequest, pooling.CohereEmbedResponse, {"texts": _TEXTS, "input_type": "search_document"}),
    ("/classify", "The probability of each class, for every input; for servers of classifiers.",
     pooling.ClassificationRequest, pooling.ClassificationResponse, {"input": ["A fine film."]}),
    ("/pooling", "What the pooler gives for every input, of any task that the model has.",
     pooling.PoolingRequest, pooling.PoolingResponse, {"input": ["A fine film."]}),
    *((path, "How well pairs of texts match.", pooling.ScoreRequest, pooling.ScoreResponse, _SCORE)
      for path in ("/score", "/v1/score")),
    *((path, "Documents in the order in which they fit a query.", pooling.RerankRequest, pooling.RerankResponse, _RERANK)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ("/tokenize", "Token ids of a prompt or of messages.",
     protocol.TokenizeRequest, protocol.TokenizeResponse, {"prompt": "Hello"}),
    ("/detokenize", "The text of token ids.",
     protocol.DetokenizeRequest, protocol.DetokenizeResponse, {"tokens": [1, 2, 3]}),
)  # fmt: skip
_KEPT: tuple[tuple[str, str, str, type, dict[str, str]], ...] = (
    ("/v1/responses/{response_id}", "get",
     "A response that was kept; `stream=true`: its events, behind number `starting_after`.",
     kept.ResponseObject, {"stream": "boolean", "starting_after": "integer"}),
    ("/v1/responses/{response_id}", "delete", "Forget a response.", kept.DeletedResponse, {}),
    ("/v1/responses/{response_id}/cancel", "post", "Stop a response made in the background.", kept.ResponseObject, {}),
    ("/v1/responses/{response_id}/input_items", "get", "The items that a response was made from.",
     kept.ItemList, {"limit": "integer", "order": "string", "after": "string"}),
)  # fmt: skip
_ACTIONS: tuple[tuple[str, str], ...] = (
    ("/reset_prefix_cache", "Forget every cached prefix."),
    ("/start_profile", "Profile the workers' steps from now on, as --profiler-config says; 400 without it."),
    ("/stop_profile", "End the profile; tells the files that were written."),
    ("/v1/load_lora_adapter", "Refused: adapters are not supported yet."),
    ("/v1/unload_lora_adapter", "Refused: adapters are not supported yet."),
)
_READS: tuple[tuple[str, str, type | None], ...] = (
    ("/v1/models", "The served models.", protocol.ModelList),
    ("/v1/models/{model}", "One served model.", protocol.ModelCard),
    ("/health", "200 while the engine lives and makes progress; needs no key.", None),
    ("/ping", "The same as /health, under another name.", None),
    ("/live", "200 unless the engine has died, also while it starts; needs no key.", None),
    ("/ready", "200 while new requests are welcome.", None),
    ("/version", "The server's version.", None),
    ("/load", "Requests in flight.", None),
    ("/tokenizer_info", "What the tokenizer is, and its chat template.", None),
    ("/metrics", "Prometheus metrics.", None),
    ("/console/state", "What the engine does now: figures, the last steps, live and finished requests.", None),
    ("/console/requests/{id}", "What happened to a request, by the id of its answer or its X-Request-Id.", None),
)


def build_openapi(title: str = "Quire") -> dict[str, Any]:
    kinds: list[Any] = [ErrorResponse]
    kinds += [kind for _, _, body, answer, _ in _WORK for kind in (body, answer)]
    kinds += [answer for _, _, answer in _READS if answer is not None]
    kinds += [answer for _, _, _, answer, _ in _KEPT if answer not in kinds]
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(kinds, ref_template=template)
    reference = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, body, answer, example in _WORK:
        streams = "stream" in body.__struct_fields__
        paths[path] = {"post": _work_operation(summary, reference[body], reference[answer], example, streams)}
    for path, summary, kind in _READS:
        paths[path] = {"get": _read_operation(path, summary, reference[kind] if kind else None)}
    for path, method, summary, kind, query in _KEPT:
        operation = _read_operation(path, summary, reference[kind])
        named = [{"name": name, "in": "query", "schema": {"type": of_type}} for name, of_type in query.items()]
        operation["parameters"] += named
        paths.setdefault(path, {})[method] = operation
    for path, summary in _ACTIONS:
        paths[path] = {"post": _read_operation(path, summary, None)}
    paths["/ping"]["post"] = paths["/ping"]["get"]
    bodies = [
        {"$ref": reference[body]["$ref"]}
        for path, _, body, _, _ in _WORK
        if not path.endswith(
            (
                "tokenize",
                "messages",
                "count_tokens",
                "responses",
                "input_tokens",
                "batch",
                "generative_scoring",
                "generate",
            )
        )
    ]
    any_body = {"anyOf": list({body["$ref"]: body for body in bodies}.values())}
    summary = "Any of the bodies above: the route is chosen by its fields."
    paths["/invocations"] = {"post": _work_operation(summary, any_body, {"type": "object"}, _WORK[0][4], True)}
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
        "security": [{}, {"bearer": []}],
    }


def _work_operation(summary: str, body: Any, answer: Any, example: dict[str, Any], streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {}  # an OpenAPI 3.1 document has no word for the form of one event
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body, "example": example}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **openapi_error_responses()},
    }


def _read_operation(path: str, summary: str, answer: Any) -> dict[str, Any]:
    content = {"content": {"application/json": {"schema": answer}}} if answer else {}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", **content}, **openapi_error_responses()},
    }
    for name in re.findall(r"{(\w+)}", path):
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
