"""A conversation with a running server (its messages, its settings, what is sent and kept), and the /commands of `quire chat`.

Knows chat completions' bodies.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.entrypoints.cli.terminal import LineReader, StreamedAnswer, columns, tell
from quire.errors import RequestError, did_you_mean, nearest

if TYPE_CHECKING:
    from quire.entrypoints.http_client import OpenAIClient


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
        Raises RequestError, EngineError: the server refused it, or failed.
        Raises KeyboardInterrupt: the answer was stopped; what had come is kept."""
        turn: list[Message] = [{"role": "user", "content": text}]
        for _ in range(MAX_TOOL_ROUNDS):
            calls = self._answer(turn)
            if not calls:
                self.messages += turn
                return
            for call in calls:
                result = self._ask_result(call["function"]["name"], call["function"]["arguments"])
                if result is None:
                    tell("(forgotten)")
                    return
                turn.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        raise RequestError(f"the model called tools {MAX_TOOL_ROUNDS} times in a row")

    def _answer(self, turn: list[Message]) -> list[dict[str, Any]]:
        """Add one answer to a turn; its tool calls."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self.settings, "messages": [*system, *self.messages, *turn]}
        if self.tools:
            body["tools"] = self.tools
        if self.shows_statistics:
            body["stream_options"] = {"include_usage": True}
        answer = StreamedAnswer()
        try:
            answer.show(self._client.stream("/chat/completions", body))
        except KeyboardInterrupt:
            if answer.content:
                self.messages += [*turn, {"role": "assistant", "content": answer.content}]
            raise
        message: Message = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        turn.append(message)
        if self.shows_statistics:
            answer.tell_statistics()
        if answer.finish_reason == "length":
            tell("(cut off: max_tokens, or the end of the context)")
        return answer.tool_calls

    def forget_last_turn(self) -> str:
        """Remove the last question and all that followed it; gives the question. Raises RequestError: there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return str(message["content"])
        raise RequestError("nothing was asked yet")

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


_OWN = {"messages": "type them", "stream": "answers always stream", "tools": "use /tools FILE", "model": "use /model"}
"""Fields that `/set` leaves to other commands."""


class Commands:
    """What the user may type after a slash.

    Args:
        reader: told when /multiline changes.
    """

    def __init__(self, conversation: Conversation, reader: LineReader) -> None:
        self._conversation = conversation
        self._reader = reader

    def run(self, line: str) -> bool:
        """Run a line that starts with a slash; False when the user leaves.
        Raises QuireError, OSError: the command cannot do it."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word in COMMANDS:
            COMMANDS[word].run(self, rest.strip())
        else:
            near = nearest(word, COMMANDS)
            tell(f"{word} is not a command; " + (f"did you mean {near}?" if near else "/help lists them"))
        return True

    def help(self, rest: str) -> None:
        tell("\n".join(columns({name + command.takes: command.about for name, command in COMMANDS.items()})))

    def reset(self, rest: str) -> None:
        self._conversation.messages.clear()

    def system(self, rest: str) -> None:
        self._conversation.system = rest or None

    def set(self, rest: str) -> None:
        settings = self._conversation.settings
        name, _, text = rest.partition(" ")
        name = name.replace("-", "_")
        if not name:
            tell("\n".join(columns({key: json.dumps(value) for key, value in settings.items()})))
            return
        if name in _OWN or not text.strip():
            raise RequestError(f"/set {name}: {_OWN.get(name, 'a value is missing (/unset takes a setting back)')}")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text.strip()
        if name not in (known := _known_fields()):
            tell(f"{name} is not a field that Quire knows; sent all the same" + did_you_mean(name, known))
        settings[name] = value

    def unset(self, rest: str) -> None:
        name = rest.replace("-", "_")
        if name in _OWN or name not in self._conversation.settings:
            raise RequestError(f"/unset: {rest!r} is not set")
        del self._conversation.settings[name]

    def model(self, rest: str) -> None:
        if rest:
            self._conversation.settings["model"] = rest
        else:
            tell(self._conversation.settings["model"])

    def tools(self, rest: str) -> None:
        if not rest:
            names = [tool["function"]["name"] for tool in self._conversation.tools]
            tell(", ".join(names) or "no tools; /tools FILE reads some")
        else:
            self._conversation.tools = [] if rest == "off" else read_tools(rest)

    def retry(self, rest: str) -> None:
        self._conversation.ask(self._conversation.forget_last_turn())

    def undo(self, rest: str) -> None:
        self._conversation.forget_last_turn()

    def stats(self, rest: str) -> None:
        self._conversation.shows_statistics ^= True
        tell(f"statistics are {'shown' if self._conversation.shows_statistics else 'not shown'}")

    def multiline(self, rest: str) -> None:
        self._reader.multiline ^= True
        tell("an empty line ends a message" if self._reader.multiline else "the end of the line ends a message")

    def save(self, rest: str) -> None:
        _need_file(rest)
        with open(rest, "w", encoding="utf-8") as file:
            file.write(self._conversation.as_json())
        tell(f"saved {len(self._conversation.messages)} messages to {rest}")

    def load(self, rest: str) -> None:
        _need_file(rest)
        with open(rest, encoding="utf-8", errors="replace") as file:
            self._conversation.restore(file.read())
        tell(f"loaded {len(self._conversation.messages)} messages from {rest}")


def _need_file(name: str) -> None:
    if not name:
        raise RequestError("a file's name is missing")


class Command(NamedTuple):
    """What a command takes, what it does, and how."""

    takes: str
    about: str
    run: Callable[[Commands, str], None]


COMMANDS: dict[str, Command] = {
    "/help": Command("", "this list", Commands.help),
    "/reset": Command("", "forget the conversation", Commands.reset),
    "/retry": Command("", "ask the last question again", Commands.retry),
    "/undo": Command("", "take the last question and its answer back", Commands.undo),
    "/system": Command(" [TEXT]", "what the model is told first; nothing: no system prompt", Commands.system),
    "/set": Command(
        " [NAME VALUE]", "any field of the request: /set temperature 0.2; nothing: list them", Commands.set
    ),
    "/unset": Command(" NAME", "take a field back", Commands.unset),
    "/model": Command(" [NAME]", "use another of the server's models; nothing: tell which", Commands.model),
    "/tools": Command(" [FILE|off]", "tools from a JSON file; their results are asked of you", Commands.tools),
    "/save": Command(" FILE", "write the conversation to a file", Commands.save),
    "/load": Command(" FILE", "go on with a conversation of a file", Commands.load),
    "/multiline": Command("", 'messages end with an empty line (or type """ … """)', Commands.multiline),
    "/stats": Command("", "tell tokens and seconds after each answer, or stop telling", Commands.stats),
    "/exit": Command("", "leave (also /quit, Ctrl-D); Ctrl-C stops an answer", lambda commands, rest: None),
}


def read_tools(path: str) -> list[dict[str, Any]]:
    """Function definitions of a JSON file: a list of OpenAI's tools, or of bare functions.
    Raises RequestError: the file cannot be read, or holds something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        entries = content if isinstance(content, list) else [content]
        tools = [entry if "function" in entry else {"type": "function", "function": entry} for entry in entries]
        if not all(isinstance(tool["function"]["name"], str) for tool in tools):
            raise ValueError("a function has no name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"tools: {path!r} holds no JSON list of functions: {error}") from None
    return tools


def _known_fields() -> tuple[str, ...]:
    from quire.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest.__struct_fields__
