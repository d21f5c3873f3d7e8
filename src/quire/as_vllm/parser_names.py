"""What vLLM's plugins of parsers import besides `quire.parsers.plugin`: the class of reasoning between two tokens, and what a
streaming method gives. Quire calls a tool parser with the whole answer, so that streaming methods are only defined."""

import dataclasses

from quire.parsers.plugin import ReasoningParser

__all__ = ["BaseThinkingReasoningParser", "DeltaFunctionCall", "DeltaMessage", "DeltaToolCall"]

BaseThinkingReasoningParser = ReasoningParser


@dataclasses.dataclass
class DeltaFunctionCall:
    """A further part of a call's name and arguments."""

    name: str | None = None
    arguments: str | None = None


@dataclasses.dataclass
class DeltaToolCall:
    """A further part of a call."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | None = None


@dataclasses.dataclass
class DeltaMessage:
    """A further part of an answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = dataclasses.field(default_factory=list[DeltaToolCall])
