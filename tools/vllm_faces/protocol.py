"""The request and answer types that the cases build and look at: vLLM's names, as far as the cases use them."""

import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow")


class FunctionDefinition(_Model):
    """A function that a request offers."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(_Model):
    """A tool of a chat request."""

    type: str = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(_Model):
    """The name of a function that must be called."""

    name: str


class ChatCompletionNamedToolChoiceParam(_Model):
    """A function that must be called."""

    function: ChatCompletionNamedFunction
    type: str = "function"


class ChatCompletionRequest(_Model):
    """A chat request."""

    messages: list[Any] = []
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    skip_special_tokens: bool = True
    response_format: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _choose(self) -> "ChatCompletionRequest":
        if self.tool_choice is None:
            self.tool_choice = "auto" if self.tools else "none"
            self.model_fields_set.discard("tool_choice")
        elif isinstance(self.tool_choice, dict):
            self.tool_choice = ChatCompletionNamedToolChoiceParam(**self.tool_choice)
        return self


class ResponsesRequest(_Model):
    """A request to `/v1/responses`."""

    input: Any = None
    model: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    skip_special_tokens: bool = True


class FunctionCall(_Model):
    """A call's name and its arguments as JSON."""

    id: str | None = None
    name: str
    arguments: str


class ToolCall(_Model):
    """A whole call."""

    id: str = Field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaFunctionCall(_Model):
    """More of a call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(_Model):
    """More of the call with an index."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(_Model):
    """More of an answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = []


class ExtractedToolCallInformation(_Model):
    """What a tool parser finds in a whole answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None
