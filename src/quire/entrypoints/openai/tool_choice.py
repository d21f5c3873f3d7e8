"""Which functions an answer may call, and whether it must (`tools`, `tool_choice`, `strict`); and the grammar that sees to it.

Checks shapes and names. How calls are written belongs to `quire.parsers`. A model without a format of its own, and functions
that its own has no words for, have calls as a JSON list.
"""

import dataclasses
import functools
import importlib.util
import json
from typing import Any, Literal

from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.guards import is_dict, is_sequence
from quire.parsers.call_grammar import calls_only, calls_or_json, harmony_calls, text_and_calls
from quire.parsers.choice import AUTO, AnswerFormats
from quire.parsers.formats import PLAIN, ToolFormat
from quire.parsers.offered import Function, offered_functions
from quire.parsers.schemas import Inexpressible

_MODES = ("none", "auto", "required")
_MAX_NAME = 256


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """What a request says of calls.

    Attributes:
        kind: `required`: at least one call and nothing else; `named`: one call of one function.
        functions: those that may be called.
        is_narrowed: the request offers more than may be called.
    """

    kind: Literal["none", "auto", "required", "named"] = "none"
    functions: tuple[Function, ...] = ()
    is_narrowed: bool = False

    @property
    def must_call(self) -> bool:
        return self.kind in ("required", "named")

    @property
    def wants_schemas(self) -> bool:
        """Whether calls have to follow what the request says of them, though none has to be made."""
        return self.kind == "auto" and (self.is_narrowed or any(function.is_strict for function in self.functions))


def read_tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """What a request says of calls. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    for index, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools[{index}]")
    functions = tuple(offered_functions(request.tools))
    given = request.tool_choice
    if is_dict(given):
        return _chosen(given, functions)
    if given == "any":  # Mistral's word, and Anthropic's
        given = "required"
    if given is not None and given not in _MODES:
        allowed = ", ".join(map(repr, _MODES))
        raise bad_field("tool_choice", f"{given!r} is unknown; allowed: {allowed}, or a named function.")
    if given == "required":
        _need(functions, given)
        return ToolChoice("required", functions)
    return ToolChoice("none") if given == "none" or not functions else ToolChoice("auto", functions)


def _chosen(given: dict[str, Any], functions: tuple[Function, ...]) -> ToolChoice:
    kind = given.get("type")
    if kind == "function":
        name = _name(given, "tool_choice")
        _need(functions, name)
        return ToolChoice("named", _found([name], functions, "tool_choice.function.name"))
    if kind == "allowed_tools":
        inner = given["allowed_tools"] if is_dict(given.get("allowed_tools")) else given
        mode, tools = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required"):
            raise bad_field("tool_choice.mode", f"{mode!r} is unknown; allowed: 'auto', 'required'.")
        if not is_sequence(tools) or not tools:
            raise bad_field("tool_choice.tools", "expected a list of at least one function.")
        _need(functions, "allowed_tools")
        names = [_name(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
        found = _found(names, functions, "tool_choice.tools")
        return ToolChoice("required" if mode == "required" else "auto", found, len(found) < len(functions))
    raise bad_field("tool_choice.type", f"{kind!r} is unknown; allowed: 'function', 'allowed_tools'.")


def _need(functions: tuple[Function, ...], choice: str) -> None:
    if not functions:
        raise bad_field("tool_choice", f"{choice!r} needs at least one function in `tools`.")


def _found(names: list[str], functions: tuple[Function, ...], field: str) -> tuple[Function, ...]:
    offered = [function.name for function in functions]
    if missing := [name for name in names if name not in offered]:
        raise bad_field(field, f"{missing[0][:100]!r} is not one of `tools`: {', '.join(offered)[:500]}.")
    return tuple(function for function in functions if function.name in names)


def _check_tool(tool: dict[str, Any], path: str) -> None:
    kind = tool.get("type", "function")
    if kind != "function":
        shown = repr(kind)[:60]
        raise bad_field(f"{path}.type", f"{shown} is not supported; allowed: 'function'.", "not_supported")
    name = _name(tool, path)
    if len(name) > _MAX_NAME:
        raise bad_field(f"{path}.function.name", f"{len(name)} characters; at most {_MAX_NAME}.")
    parameters = tool["function"].get("parameters") if is_dict(tool.get("function")) else tool.get("parameters")
    if parameters is None:
        return
    field = f"{path}.function.parameters"
    if not is_dict(parameters):
        raise bad_field(field, "expected a JSON schema of type 'object'.")
    if parameters.get("type", "object") != "object":
        raise bad_field(f"{field}.type", f"{parameters['type']!r} is not possible; allowed: 'object'.")


def _name(value: Any, path: str) -> str:
    function = value.get("function", value) if is_dict(value) else None
    name = function.get("name") if is_dict(function) else None
    if not isinstance(name, str) or not name:
        raise bad_field(f"{path}.function.name", "expected the name of a function.")
    return name


_MOST_KEPT, _LONGEST_KEPT = 64, 1 << 18
"""Grammars that are remembered, and characters of functions whose grammar is."""


def enforced(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool
) -> tuple[AnswerFormats, str | None]:
    """The formats that an answer is read in, and its grammar; None where it is free. `only_one`: at most one call.
    Raises HTTPError, a 400, if the format cannot express a function."""
    if formats.strict_level == "parameter":
        functions = tuple(dataclasses.replace(function, is_strict=True) for function in choice.functions)
        choice = dataclasses.replace(choice, functions=functions)
    if not choice.must_call:
        wanted = choice.kind == "auto" and (choice.wants_schemas or formats.strict_level != AUTO)
        wanted = wanted and _has_grammars(tokenizer)
        return formats, _derived("text", formats, choice, tokenizer, only_one) if wanted else None
    only_one = only_one or choice.kind == "named"
    if (grammar := _derived("calls", formats, choice, tokenizer, only_one)) is not None:
        return formats, grammar
    if formats.is_harmony:
        message = "this model can call functions whose names are letters, digits, '_', '-' and '.' alone."
        raise bad_field("tools", message)
    tools = PLAIN if formats.tools is None else dataclasses.replace(PLAIN, ids=formats.tools.ids)
    plain = dataclasses.replace(formats, tools=tools)
    return plain, _derived("calls", plain, choice, tokenizer, only_one)


def calls_or_answer(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool, schema: dict[str, Any]
) -> str | None:
    """The grammar of an answer that either calls or is JSON of a schema; None where the format has no words for the calls."""
    return _derived("answer", formats, choice, tokenizer, only_one, schema)


def _derived(
    kind: str,
    formats: AnswerFormats,
    choice: ToolChoice,
    tokenizer: Any,
    only_one: bool,
    schema: dict[str, Any] | None = None,
) -> str | None:
    """A grammar; None where the format has no words for it, and calls are read as they come."""
    if formats.tools is None and not formats.is_harmony:
        return None
    functions = [(each.name, each.parameters, each.is_strict) for each in choice.functions]
    asked = json.dumps([functions, schema])
    derive = _derive if len(asked) <= _LONGEST_KEPT else _derive.__wrapped__
    return derive(kind, None if formats.is_harmony else formats.tools, tokenizer, only_one, asked)


@functools.lru_cache(_MOST_KEPT)
def _derive(kind: str, tools: ToolFormat | None, tokenizer: Any, only_one: bool, asked: str) -> str | None:
    """`tools` is None for gpt-oss; `asked` is what cannot be hashed: functions and a schema."""
    given, schema = json.loads(asked)
    functions, special = [Function(*fields) for fields in given], special_tokens(tokenizer)
    try:
        if tools is None:
            return harmony_calls(functions, special, kind == "calls", schema)
        if kind == "calls":
            return calls_only(tools, functions, special, only_one)
        if kind == "text":
            return text_and_calls(tools, functions, special, only_one)
        return calls_or_json(tools, functions, special, only_one, schema)
    except Inexpressible:
        return None


def _has_grammars(tokenizer: Any) -> bool:
    return getattr(tokenizer, "token_bytes", None) is not None and importlib.util.find_spec("llguidance") is not None


@functools.lru_cache(4)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens, which are never text: their strings and ids."""
    ids = sorted(getattr(tokenizer, "special_ids", ()))
    return {token: token_id for token_id in ids if (token := tokenizer.id_to_token(token_id))}
