"""Answers of a checkpoint that brings its own format: the `response_template` of its tokenizer_config.json.

Transformers reads it (`transformers.utils.chat_parsing`); here its regions become reasoning, content and calls.
"""

import contextlib
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from quire.errors import ConfigError
from quire.extras import install_command
from quire.guards import is_dict, is_sequence
from quire.logger import init_logger
from quire.parsers.pieces import Kind, Pieces
from quire.parsers.reader import Reader, Waiting
from quire.parsers.reasoning import Reasoning

logger = init_logger(__name__)

NAMES = ("hf", "beam")
"""Names of such a format; it is one for reasoning, content and calls together."""
_KINDS: dict[str, Kind] = {"thinking": "reasoning", "content": "content", "tool_calls": "call"}


def read_response_template(folder: str, setting: str) -> dict[str, Any]:
    """The template of a checkpoint, checked.

    Raises:
        ConfigError: there is none, it has regions that are neither reasoning nor content nor calls, or Transformers is missing.
    """
    path = Path(folder) / "tokenizer_config.json"
    config: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    given: Any = config.get("response_template") if is_dict(config) else None
    if not is_dict(given):
        message = f"{setting} needs a `response_template` in the model's tokenizer_config.json, and {folder} has none"
        raise ConfigError(message, setting=setting)
    template: dict[str, Any] = copy.deepcopy(given)
    fields: Any = template.get("fields")
    unknown = sorted(set(map(str, fields)) - set(_KINDS)) if is_dict(fields) else []
    if unknown:
        message = f"{setting}: the model's response_template has {unknown[0]!r}; allowed: {', '.join(_KINDS)}"
        raise ConfigError(message, setting=setting)
    for field in (fields if is_dict(fields) else {}).values():
        field["optional"] = True  # an answer that is cut off is answered with what it has
    if (
        is_dict(fields)
        and "content" not in fields
        and all("open" in each or "open_pattern" in each for each in fields.values())
    ):
        fields["content"] = {}
    try:
        _parser_class()(template, prefix="")
    except ImportError as error:
        message = f"{setting} needs Transformers 5.23 or later: {install_command('transformers')}"
        raise ConfigError(message, setting=setting) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}: the model's response_template is wrong: {error}", setting=setting) from None
    return template


def reasoning_of_template(template: dict[str, Any]) -> Reasoning | None:
    """Where the reasoning begins and ends, if its markers are texts."""
    field: dict[str, Any] = template["fields"].get("thinking") or {}
    start, end = (_texts(field.get(name)) for name in ("open", "close"))
    return Reasoning(start, end) if start and end else None


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value)) if is_sequence(value) else ()


def _parser_class() -> Any:
    from transformers.utils.chat_parsing import ResponseParser  # type: ignore[import-untyped]

    return ResponseParser


def parse(
    reader: Reader,
    out: Pieces,
    template: dict[str, Any],
    prompt: str,
    offered: Sequence[dict[str, Any]],
    has_tools: bool,
) -> Waiting[None]:
    """Read a whole answer.

    Args:
        prompt: the prompt that is answered; it may end within a region.
        offered: the request's tools, whose schemas say what arguments are.
        has_tools: calls are looked for; otherwise they are content as they stand.
    """

    def begin() -> Any:
        return _parser_class()(template, prefix=prompt, tools=list(offered))

    parser, regions, before = begin(), _Regions(out, has_tools, begin()), ""
    while True:
        ended = reader.ended
        text = reader.take(len(reader.text))
        try:
            regions.read(parser.feed(text))
            before += text
            text = ""
            if ended:
                regions.read(parser.feed(_rest_of_close(template["fields"].get(regions.field), before)))
                regions.read(parser.finalize()[1])
        except ValueError as error:  # a region that is not what the template says
            logger.warning("The rest of an answer stays text: its response_template does not read it: %s", error)
            rest = _behind_error(begin(), regions, before, text)
            out.text("content", regions.held + rest)
            while not reader.ended:
                yield
                out.text("content", reader.take(len(reader.text)))
            return
        if ended:
            return
        yield


def _rest_of_close(field: dict[str, Any] | None, text: str) -> str:
    """What is missing of a region's end marker where the text ends behind one of the marker's special tokens."""
    for marker in () if field is None else _texts(field.get("close")):
        for size in range(len(marker) - 1, 0, -1):
            if marker[size - 1] == ">" and text.endswith(marker[:size]):
                return marker[size:]
    return ""


def _behind_error(parser: Any, regions: "_Regions", before: str, text: str) -> str:
    """Read a text again up to the character that cannot be read; returns what follows."""
    parser.feed(before)
    for index, char in enumerate(text):
        try:
            regions.read(parser.feed(char))
        except ValueError:
            return text[index + 1 :]
    return ""


class _Regions:
    """Hands the events of an answer on.

    Args:
        parser: one that has read the prompt, and reads no more.

    Attributes:
        field: the name of the region that is open; empty: none.
        held: the text of a call so far.
    """

    def __init__(self, out: Pieces, has_tools: bool, parser: Any) -> None:
        self._out = out
        self._has_tools = has_tools
        self.field = self.held = ""
        self._track(parser.initial_events)
        if self.field and _KINDS[self.field] != "call":
            out.resume(_KINDS[self.field])
        # A marker that the prompt begins and the answer does not complete comes as text. It is no part of the answer.
        self._of_prompt = ""
        with contextlib.suppress(ValueError):
            self._of_prompt = "".join(event.get("text", "") for event in parser.finalize()[1])

    def _track(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] != "region_chunk":
                self.field = event["field"] if event["type"] == "region_open" else ""

    def read(self, events: list[dict[str, Any]]) -> None:
        self._track(events)
        for event in events:
            kind = _KINDS[event["field"]]
            if event["type"] == "region_open":
                self._out.marker()
            elif event["type"] == "region_close":
                self._close(kind, event.get("value"))
            elif kind == "call":
                self.held += event["text"]
            else:
                self._out.text(kind, event["text"].removeprefix(self._of_prompt))
                self._of_prompt = ""

    def _close(self, kind: Kind, value: Any) -> None:
        held, self.held = self.held, ""
        calls = [] if kind != "call" or not self._has_tools else _calls(value)
        for name, arguments in calls:
            self._out.call(name)
            self._out.arguments(arguments)
            self._out.in_call = False
        if held and not calls:
            self._out.text("content", held)
        self._out.marker()


def _calls(value: Any) -> list[tuple[str, str]]:
    """Names and arguments; none if one of them is no call."""
    found: list[tuple[str, str]] = []
    for item in cast("Sequence[Any]", value) if is_sequence(value) else [value]:
        function: Any = item.get("function", item) if is_dict(item) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name or arguments is None:
            return []
        found.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return found
