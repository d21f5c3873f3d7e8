"""The bodies that the server answers with, as msgspec structs: encoded without pydantic, described in the OpenAPI page.

Optional extras (`prompt_logprobs`, `token_ids` …) are left out when unset; fields that OpenAI always sends are always sent.
"""

from typing import Any

import msgspec

UNSET = msgspec.UNSET
Optional = msgspec.UnsetType


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose keys and values came from the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens that the model thought with, markers included."""

    reasoning_tokens: int = 0


class Timing(msgspec.Struct):
    """Where a request's time went, under vLLM's names; None where the moment never came.

    Attributes:
        time_to_first_token_ms: from leaving the queue to the first token.
        generation_time_ms: from the first token to the last.
        queue_time_ms: from arrival at the engine to leaving its queue.
        mean_itl_ms: between two tokens of a sequence.
        tokens_per_second: since it left the queue.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | Optional = UNSET


class TokenTopLogprob(msgspec.Struct):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TokenTopLogprob):
    """One sampled chat token."""

    top_logprobs: list[TokenTopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat choice."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion choice: four parallel lists."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class FunctionCall(msgspec.Struct):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    """The assistant's turn; `reasoning` is what it thought before."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | Optional = UNSET
    tool_calls: list[ToolCall] | Optional = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | Optional = UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Timing | Optional = UNSET
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | Optional = UNSET
    prompt_token_ids: list[int] | Optional = UNSET
    prompt_text: str | Optional | None = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | Optional = UNSET
    prompt_token_ids: list[int] | Optional = UNSET
    token_ids: list[int] | Optional = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Timing | Optional = UNSET
    system_fingerprint: str | None = None


class LabelScore(msgspec.Struct):
    """One item's score."""

    index: int
    score: float
    object: str = "score"


class GenerativeScoringResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /generative_scoring`."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[LabelScore]
    usage: Usage


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(msgspec.Struct):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """Answer of `POST /detokenize`."""

    prompt: str


def build_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None, reasoning_tokens: int | None = None
) -> Usage:
    """The usage block; the shares of the cache and of the reasoning are given when they are known."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens)
    thoughts = UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details, thoughts)
