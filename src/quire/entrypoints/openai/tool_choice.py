"""Which functions an answer may call, and whether it must: `tools`, `tool_choice` and `strict` of a request.

Checks shapes and names. How calls are written belongs to `quire.parsers`.
"""

import dataclasses
from typing import Any, Literal

from quire.entrypoints.openai.errors import HTTPError, bad_field
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.guards import is_dict, is_sequence
from quire.parsers.offered import Function, offered_functions

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
        """Whether the answer has to be a call."""
        return self.kind in ("required", "named")

    @property
    def wants_schemas(self) -> bool:
        """Whether calls have to follow what the request says of them, though none has to be made."""
        return self.kind == "auto" and (self.is_narrowed or any(function.is_strict for function in self.functions))


def read_tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """What a request says of calls. Raises HTTPError: 400; `param` is the path of what is wrong."""
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
        raise _no_name(path)
    return name


def _no_name(path: str) -> HTTPError:
    return bad_field(f"{path}.function.name", "expected the name of a function.")
