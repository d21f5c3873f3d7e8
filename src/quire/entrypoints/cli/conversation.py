"""A conversation with a running server: its messages, its settings, what is sent and what is kept.

Knows chat completions' bodies. Knows nothing of commands or lines.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.entrypoints.cli.terminal import StreamedAnswer, tell
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.entrypoints.cli.http_client import OpenAIClient

MAX_TOOL_ROUNDS = 16
Message = dict[str, Any]


class Conversation:
    """The messages so far; a turn that fails leaves no trace in them.

    Args:
        settings: the body's fields that stay the same.
        ask_result: gives a tool's result for a call's name and arguments; None forgets the turn.
    """

    def __init__(
        self, client: "OpenAIClient", settings: dict[str, Any], ask_result: Callable[[str, str], str | None]
    ) -> None:
        self._client = client
        self._ask_result = ask_result
        self.settings = settings
        self.system: str | None = None
        self.tools: list[dict[str, Any]] = []
        self.messages: list[Message] = []
        self.shows_statistics = False

    def ask(self, text: str) -> None:
        """Send a message, print the answer as it comes, keep both; tools' results are asked for and sent.

        Raises:
            RequestError, EngineError: the server refused it, or failed.
            KeyboardInterrupt: the answer was stopped; what had come is kept.
        """
        kept = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        is_complete = False
        try:
            for _ in range(MAX_TOOL_ROUNDS):
                calls = self._turn()
                if not calls:
                    is_complete = True
                    return
                if not self._add_results(calls):
                    tell("(forgotten)")
                    return
            raise RequestError(f"the model called tools {MAX_TOOL_ROUNDS} times in a row")
        except KeyboardInterrupt:
            is_complete = self.messages[-1]["role"] == "assistant" and not self.messages[-1].get("tool_calls")
            raise
        finally:
            if not is_complete:
                del self.messages[kept:]

    def _turn(self) -> list[dict[str, Any]]:
        """One answer; its tool calls."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self.settings, "messages": [*system, *self.messages]}
        if self.tools:
            body["tools"] = self.tools
        if self.shows_statistics:
            body["stream_options"] = {"include_usage": True}
        answer = StreamedAnswer()
        try:
            answer.show(self._client.stream("/chat/completions", body))
        except KeyboardInterrupt:
            if answer.content:
                self.messages.append({"role": "assistant", "content": answer.content})
            raise
        message: Message = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        self.messages.append(message)
        if self.shows_statistics and (told := answer.statistics()):
            tell(f"({told})")
        if answer.finish_reason == "length":
            tell("(cut off: max_tokens, or the end of the context)")
        return answer.tool_calls

    def _add_results(self, calls: list[dict[str, Any]]) -> bool:
        for call in calls:
            result = self._ask_result(call["function"]["name"], call["function"]["arguments"])
            if result is None:
                return False
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return True

    def forget_last_turn(self) -> str | None:
        """Take the last question and all that followed it back; gives the question."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = str(self.messages[index]["content"])
                del self.messages[index:]
                return question
        return None

    def as_json(self) -> str:
        """Everything that makes this conversation, to be kept in a file."""
        names = ("system", "settings", "tools", "messages")
        return json.dumps({name: getattr(self, name) for name in names}, indent=2, ensure_ascii=False) + "\n"

    def restore(self, text: str) -> None:
        """Become the conversation of `as_json`, on this server's model. Raises RequestError: the text is none."""
        try:
            kept = json.loads(text)
            messages, settings, tools = kept["messages"], kept.get("settings", {}), kept.get("tools", [])
            if not all(isinstance(message["role"], str) for message in messages) or not isinstance(tools, list):
                raise ValueError
            settings = {**settings, "model": self.settings["model"]}
        except (ValueError, KeyError, TypeError):
            raise RequestError("this file holds no conversation that /save wrote") from None
        self.messages, self.settings, self.tools, self.system = messages, settings, tools, kept.get("system")
