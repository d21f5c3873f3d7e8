"""Formats from outside: registered by a plugin, or by the Python file of `--tool-parser-plugin` or `--reasoning-parser-plugin`.

A format is data (`formats.py`). A class as vLLM's plugins have is adapted: a tool parser by its `extract_tool_calls`, which sees
whole answers, so that a streamed answer comes at its end; a reasoning parser by its `start_token` and `end_token`.
Knows registries and files; knows no model.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from quire.errors import ConfigError, refusing
from quire.guards import is_dict, is_sequence
from quire.logger import init_logger
from quire.parsers.formats import HARMONY, REASONING, TOOLS, Reasoning, ToolFormat
from quire.parsers.offered import Tools
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting
from quire.parsers.response_template import NAMES as RESPONSE_TEMPLATE
from quire.plugins.registry import owned_by

logger = init_logger(__name__)
ClassT = TypeVar("ClassT", bound=type)


def register_tool_format(
    name: str, tool_format: ToolFormat | type[Any], *, override: bool = False, owner: str | None = None
) -> None:
    """Make a format known as `--tool-call-parser NAME`. `override`, `owner`: see `Registry.register`.

    Raises:
        ConfigError: it is neither a format nor a class with `extract_tool_calls`, or the name is taken.
    """
    _check_name(name, "tool_call_parser")
    if not isinstance(tool_format, ToolFormat):
        if not callable(getattr(tool_format, "extract_tool_calls", None)):
            message = (
                f"tool_parser_plugin: {name!r} needs a ToolFormat, or a class with extract_tool_calls(text, request)"
            )
            raise ConfigError(message, setting="tool_parser_plugin")
        special = tuple(map(str, getattr(tool_format, "special_tokens", ())))
        tool_format = ToolFormat(WholeAnswer(tool_format), bare=True, inner=special)
    TOOLS.register(name, tool_format, override=override, owner=owner)


def register_reasoning_format(
    name: str, reasoning: Reasoning | type[Any], *, override: bool = False, owner: str | None = None
) -> None:
    """Make a format known as `--reasoning-parser NAME`. `override`, `owner`: see `Registry.register`.

    Raises:
        ConfigError: it is neither a format nor a class with `start_token` and `end_token`, or the name is taken.
    """
    _check_name(name, "reasoning_parser")
    if not isinstance(reasoning, Reasoning):
        blank = object.__new__(reasoning)  # properties need no tokenizer
        what = f"reasoning_parser_plugin: {name!r} needs a Reasoning, or a class with start_token and end_token"
        with refusing(Exception, setting="reasoning_parser_plugin", what=what):
            start, end = str(blank.start_token), str(blank.end_token)
        reasoning = Reasoning((start,), (end,), implied=bool(getattr(reasoning, "implied", False)))
    REASONING.register(name, reasoning, override=override, owner=owner)


def load_parser_file(path: str | None, setting: str) -> None:
    """Run the operator's file, which registers formats. Nothing without a path.

    Raises:
        ConfigError: it is not there, or fails.
    """
    if not path:
        return
    if not Path(path).is_file():
        raise ConfigError(f"{setting}: there is no file {path!r}.", setting=setting)
    spec = importlib.util.spec_from_file_location(f"quire_{setting}_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {path!r} is not a Python file (.py).", setting=setting)
    try:
        with owned_by(f"{setting} {path}"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ConfigError:
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "vllm":
            hint = " (start with `quire as-vllm`, or import vLLM's names from quire.parsers.plugin)"
        message = f"{setting}: {path!r} fails: {type(error).__name__}: {error}{hint}"
        raise ConfigError(message, setting=setting) from error


def _check_name(name: str, setting: str) -> None:
    if not name or name in ("auto", "none", *HARMONY, *RESPONSE_TEMPLATE):
        raise ConfigError(f"{setting}: a plugin cannot call a format {name!r}", setting=setting)


@dataclasses.dataclass(frozen=True)
class WholeAnswer:
    """Calls that a class finds in the whole answer, `content` beside them."""

    parser: type[Any]

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        while not reader.ended:
            yield
        try:
            request = SimpleNamespace(tools=_as_objects(tools.offered), tool_choice="auto", skip_special_tokens=False)
            found = self.parser(tools.tokenizer).extract_tool_calls(reader.text, request)
            calls = [(str(call.function.name), str(call.function.arguments)) for call in found.tool_calls or ()]
        except Exception as error:
            logger.exception("The tool parser %s failed; the answer stays text.", self.parser.__name__)
            reader.take(len(reader.text))
            raise Malformed from error
        reader.take(len(reader.text))
        if not calls:
            raise Malformed
        out.text("content", str(found.content or ""))
        for name, arguments in calls:
            out.call(name)
            out.arguments(arguments)
        out.in_call = False


def _as_objects(value: Any) -> Any:
    """JSON whose first levels have attributes, as vLLM's requests have; parameters stay what they are."""
    if is_sequence(value):
        return [_as_objects(item) for item in cast("Sequence[Any]", value)]
    if not is_dict(value):
        return value
    return SimpleNamespace(**{key: item if key == "parameters" else _as_objects(item) for key, item in value.items()})


# --- the names that vLLM's plugins import ---


@dataclasses.dataclass
class FunctionCall:
    """A call's name and its arguments as JSON."""

    name: str
    arguments: str


@dataclasses.dataclass
class ToolCall:
    """A call; its id is made when it is answered."""

    function: FunctionCall
    id: str = ""
    type: str = "function"


@dataclasses.dataclass
class ExtractedToolCallInformation:
    """What `extract_tool_calls` gives."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class _Parser:
    def __init__(self, tokenizer: Any = None, tools: Any = None) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools

    @property
    def vocab(self) -> dict[str, int]:
        """Each token's id."""
        return self.model_tokenizer.get_vocab()


class ToolParser(_Parser):
    """Base of tool parsers; `special_tokens` names those of the tokenizer's special tokens that it looks for."""

    special_tokens: Sequence[str] = ()


class ReasoningParser(_Parser):
    """Base of reasoning parsers; `implied`: an answer begins within the reasoning."""

    implied = False


class _Manager:
    def __init__(self, register: Callable[..., None]) -> None:
        self._register = register

    def register_module(
        self, name: str | list[str] | None = None, force: bool = True, module: type[Any] | None = None
    ) -> Any:
        """Register a class under its names (`force`: in place of what has one of them); without `module`, a decorator."""

        def decorate(parser: ClassT) -> ClassT:
            for each in [name] if isinstance(name, str) else name or [parser.__name__]:
                self._register(each, parser, override=force)
            return parser

        return decorate if module is None else decorate(module)

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """Register a class of a module by its name; here it is imported at once."""
        self._register(name, getattr(importlib.import_module(module_path), class_name), override=True)


ToolParserManager = _Manager(register_tool_format)
ReasoningParserManager = _Manager(register_reasoning_format)
