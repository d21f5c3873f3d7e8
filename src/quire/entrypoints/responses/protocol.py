"""What `/v1/responses` reads and answers, as msgspec structs.

Names and types only. Input items, tools and formats are plain dicts: they are checked where they are converted.
"""

import uuid
from typing import Annotated, Any, Literal

import msgspec

from quire.entrypoints.http.long_bodies import Page
from quire.entrypoints.openai.protocol import UNSET, Metadata, Optional, RequestFields, Timing, TokenLogprob

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_id(kind: str) -> str:
    """An id that cannot be guessed: a client that knows it may read what it names."""
    return f"{_PREFIXES.get(kind, kind)}_{uuid.uuid4().hex}"


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text for the user."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """The assistant's words."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The assistant's thoughts."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call that the model asks for; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class RawMessage(msgspec.Struct, tag_field="type", tag="raw_message_tokens"):
    """What the model read or wrote, as text and as token ids."""

    message: str
    tokens: list[int]


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model should think. Summaries are not made: `summary` is accepted and changes nothing."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """The format of the text: `format` is of type `text`, `json_object` or `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses/input_tokens`: what makes the prompt."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Read so that they can be refused by name.
    conversation: Any = None
    prompt: Any = None


class ResponsesRequest(RequestFields, kw_only=True):
    """Body of `POST /v1/responses`: OpenAI's fields, and the extra ones that users of vLLM send."""

    # Those of `InputTokensRequest`: a struct can have one base only.
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # vLLM's extra fields.
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = None
    # Read so that they can be refused by name.
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    previous_input_messages: Any = None


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: input tokens whose keys and values came from the prefix cache."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens that the model thought with, markers included."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: tuple[Status, ...] = ("queued", "in_progress")


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: the answer of `POST /v1/responses`, and what `GET /v1/responses/{id}` gives."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metrics: Timing | Optional = UNSET
    input_messages: list[RawMessage] | Optional = UNSET
    output_messages: list[RawMessage] | Optional = UNSET


class InputTokensResponse(msgspec.Struct):
    """Answer of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(Page, kw_only=True):
    """Answer of `GET /v1/responses/{id}/input_items`."""

    data: list[dict[str, Any]]


class DeletedResponse(msgspec.Struct):
    """Answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True
