"""What `/v1/messages` reads and answers, as msgspec structs.

Names and types only. Blocks of a request are plain dicts: they are checked where they are converted. Errors:
`{"type": "error", "error": {"type", "message"}}`.
"""

from typing import Any

import msgspec

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.openai.protocol import CacheSalt, Priority, RequestId


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    request_id: RequestId | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    priority: Priority | None = None
    timeout: float | None = None
    cache_salt: CacheSalt | None = None
    vllm_xargs: dict[str, Any] | None = None
    # Read so that they can be refused by name.
    container: Any = None
    mcp_servers: Any = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text for the user."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought; `signature` is a digest of it."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model asks for."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """`thinking_tokens`: tokens that the model thought with, markers included."""

    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct):
    """Tokens of a message. What the prefix cache gave is told apart with `--enable-prompt-tokens-details`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: OutputTokensDetails | None = None


class MessageResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/messages`."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensResponse(msgspec.Struct):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model."""

    type: str = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, kw_only=True):
    """Answer of `GET /v1/models` to a client of this protocol; all models are on the one page."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


THREAD_NOT_FOUND = "thread_not_found"
"""What makes Anthropic's clients send a whole conversation again, when they have sent its end."""


def speaks_anthropic(path: str) -> bool:
    """Whether a route's clients expect this protocol's errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class AnthropicErrorDetail(msgspec.Struct):
    """What went wrong: a class, a sentence, and what programs go by."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: AnthropicErrorDetail
    type: str = "error"


def anthropic_error(error: HTTPError) -> bytes:
    """The body of an answer that is not a success."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"error_code": THREAD_NOT_FOUND} if error.detail.code == THREAD_NOT_FOUND else msgspec.UNSET
    return msgspec.json.encode(AnthropicError(AnthropicErrorDetail(kind, error.detail.message, details)))


def error_event(error: HTTPError) -> bytes:
    """An error in a stream whose status has already been sent."""
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"
