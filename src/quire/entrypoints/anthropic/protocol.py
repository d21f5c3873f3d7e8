"""What `/v1/messages` reads and answers, as msgspec structs.

Names and types only. Blocks of a request are plain dicts: they are checked where they are converted.
"""

from typing import Any

import msgspec

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
