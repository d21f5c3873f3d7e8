"""Chat templates: Jinja2 in its immutable sandbox, with the additions that Hugging Face templates use.

Templates are the operator's (from the checkpoint or a setting); what they print is a client's conversation. A template has no
way to files, attributes of Python objects, or unbounded loops. Knows nothing of tokenizers.
"""

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from quire.errors import ConfigError, RequestError, refusing
from quire.tokenizers.content_format import ContentFormat, as_it_is, as_parts, as_text, wants_parts

_CONTINUE_MARK = "\u2063QUIRE-CONTINUE-HERE\u2063 "
"""Marks the end of a message that stays open; invisible separators keep it apart from any real text. Where its last
space is gone, the template trims what a message says."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""What templates and clients call a message's reasoning; the first is the usual one."""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Templates print tool schemas: plain JSON, not Jinja's own HTML-escaped form."""
    separators: Any = options.get("separators")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=bool(options.get("sort_keys", False)),
    )


def _make_environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's part for training; here its body is simply printed."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Dict:
        """`dict` as a function; the type itself would have more to it."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
            return dict.fromkeys(keys, value)

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = Dict()
    return environment


class ChatTemplate:
    """One or several named template sources; compiled on first use.

    Args:
        sources: a template's source, or name → source (`default`, `tool_use`, …).
    """

    def __init__(self, sources: str | Mapping[str, str]) -> None:
        self._sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._environment: Any = None
        self._compiled: dict[str, tuple[Any, bool, bool]] = {}

    @staticmethod
    def choose(own: "ChatTemplate | None", chosen: str | None) -> "ChatTemplate":
        """The template to use: `chosen` may be a name among `own`'s or a source of its own.

        Raises:
            RequestError: neither is there.
        """
        if chosen is not None:
            if own is not None and chosen in own._sources:
                return ChatTemplate(own._sources[chosen])
            return ChatTemplate(chosen)
        if own is None:
            raise RequestError(
                "this model has no chat template; pass one (`chat_template`) or use plain completions", param="messages"
            )
        return own

    def source(self, tools: list[Any] | None = None) -> str:
        """The source that a conversation with or without tools uses.

        Raises:
            RequestError: there are several templates, none of them called `default`.
        """
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if len(self._sources) == 1:
            return next(iter(self._sources.values()))
        names = ", ".join(sorted(self._sources))
        raise RequestError(f"choose a chat template by name: one of {names}", param="chat_template")

    def _compile(self, source: str) -> tuple[Any, bool, bool]:
        """The template, whether it wants content as parts, and whether it takes it so."""
        if source in self._compiled:
            return self._compiled[source]
        import jinja2

        if self._environment is None:
            self._environment = _make_environment()
        try:
            compiled = self._environment.from_string(source), *wants_parts(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"chat_template is not valid Jinja: line {error.lineno}: {error.message}", setting="chat_template"
            ) from None
        self._compiled[source] = compiled
        return compiled

    def content_format(self) -> ContentFormat:
        """What the usual template gets contents as: text, or parts."""
        return "openai" if self._compile(self.source())[1] else "string"

    def render(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        content_format: ContentFormat = "auto",
    ) -> str:
        """The conversation as text.

        Args:
            content_format: whether the template gets contents as text or as parts; `auto`: as it wants them.

        Raises:
            RequestError: the template refuses the conversation (`raise_exception`), or it cannot print it.
        """

        template, wants, takes = self._compile(self.source(tools))
        shown = as_parts if wants else as_it_is if takes else as_text
        formed = {"auto": shown, "openai": as_parts, "string": as_text}[content_format]
        messages = [formed(_with_reasoning_names(message)) for message in conversation]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude one another: a message that is continued "
                    "opens no new turn",
                    param="continue_final_message",
                )
            messages = _with_open_end(messages)
        # A template is a program of its author's, and a conversation may not suit it.
        with refusing(Exception, param="messages", what="the chat template refuses this conversation"):
            text: str = template.render(
                {
                    **dict(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        return _cut_at_open_end(text) if continue_final_message else text


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its reasoning under the names that templates look for."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _with_open_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's text."""
    if not messages:
        raise RequestError("continue_final_message needs a last message", param="messages")
    last = copy.deepcopy(messages[-1])
    content: Any = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
        return [*messages[:-1], last]
    if isinstance(content, list):
        for part in reversed(cast("list[Any]", content)):
            if isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str):
                part["text"] += _CONTINUE_MARK
                return [*messages[:-1], last]
    raise RequestError("continue_final_message needs a last message with text", param="messages")


def _cut_at_open_end(text: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    position = text.rfind(mark)
    if position < 0:
        raise RequestError(
            "continue_final_message: the chat template does not print the last message", param="continue_final_message"
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()


def read_template(setting: str) -> ChatTemplate:
    """The template that the setting `chat_template` gives: its own text, or the file that it names. It is compiled at once.
    Raises ConfigError: it is no file, or no valid template."""
    template = ChatTemplate(setting if "{" in setting or "\n" in setting else _read_source(setting))
    template.content_format()
    return template


def _read_source(path: str) -> str:
    with refusing(
        OSError,
        ValueError,
        setting="chat_template",
        what=f"chat_template {path!r} is neither a template nor a readable file",
    ):
        return Path(path).read_text("utf-8")
