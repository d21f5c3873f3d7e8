"""What a model may write where it must call a function: the grammar of a format with a request's functions.

Derived from the data by which calls are read (`formats.py`, `bodies.py`): what is written so is read back as the same calls.
Arguments follow the function's schema. Parameters that are written one by one come in the schema's order, those that are not
required may be left out.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.lark import Lark
from quire.parsers.bodies import Addressed, Body, Header, JsonObject, JsonOr, Several
from quire.parsers.braces import Braces
from quire.parsers.elements import Elements
from quire.parsers.formats import ToolFormat
from quire.parsers.offered import Function
from quire.parsers.parameter_grammar import braces_call, elements_call, python_call, tags_call
from quire.parsers.pythonic import Pythonic
from quire.parsers.schemas import Inexpressible, prepared
from quire.parsers.tags import Tags

_HARMONY_THOUGHT = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant")


def calls_only(tools: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], only_one: bool) -> str:
    """Nothing but calls, at least one.

    Raises:
        Inexpressible: the format has no words for one of the functions.
    """
    lark = Lark(special)
    return lark.write(f"space {_lead(lark, tools)} {_section(lark, tools, functions, only_one, opened=False)} space")


def text_and_calls(tools: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], only_one: bool) -> str:
    """Any text; where a marker begins a call, the call.

    Where a call needs no marker, the answer's first character tells, white space aside: with a bracket that can begin one, the
    answer is calls to its end, as it is behind a marker.

    Raises:
        Inexpressible: as of `calls_only`.
    """
    lark = Lark(special)
    if not tools.bare:
        marked = " | ".join(_marked(lark, tools, functions, only_one))
        return lark.write(f"({marked}){'?' if only_one else '*'} {_free(lark, tools)}")
    calls = lark.rule(_section(lark, tools, functions, only_one, opened=False))
    text = (r"[^\[ \t\r\n]" if isinstance(tools.body, Pythonic) else r"[^{\[ \t\r\n]") + r"(.|\n)*"
    ways = [f"{calls} space", f"({lark.pattern(text, _objects_of_calls(tools))})?"]
    markers = [marker for marker in tools.begin if marker not in tools.direct]
    if markers:
        end = "".join(f" | {lark.text(marker)}" for marker in tools.end)
        ways.append(
            f"{lark.up_to_any(markers, f'({text})?')} space {calls} space ({end.removeprefix(' | ') or 'space'})? space"
        )
    return lark.write(f"space ({' | '.join(ways)})")


def _addressed(lark: Lark, tools: ToolFormat, body: Addressed, function: Function) -> str:
    """Text up to a message to a function, and the call."""
    marker = f"{tools.begin[0]}{function.name}{body.after}{body.opening}"
    text = lark.up_to_any((marker,), never=(body.opening,))
    return f"{_framed(lark, tools)} {text} space {_call(lark, body.body, function)} space {lark.text(tools.end[0])}"


def _objects_of_calls(tools: ToolFormat) -> str:
    """What in free text would be read as a call, as a regular expression: an object with a call's key. Empty: nothing."""
    if not tools.direct or not isinstance(tools.body, JsonObject):
        return ""
    keys = "|".join((*tools.body.names, *tools.body.arguments))
    return rf'\{{[^{{}}]*"({keys})"'


def _lead(lark: Lark, tools: ToolFormat) -> str:
    """What may come before the first call."""
    return " ".join(f"({lark.text(part)} space)?" for part in tools.between)


def _free(lark: Lark, tools: ToolFormat) -> str:
    """Any text, in any frames that carry nothing."""
    return f"{_framed(lark, tools)} {lark.anything(_never(tools))}"


def _framed(lark: Lark, tools: ToolFormat) -> str:
    """Texts, each with a special token behind it that only frames it."""
    frames = [lark.text(frame) for frame in (*tools.dropped, *tools.frames) if lark.has_special(frame)]
    return f"({lark.anything(_never(tools))} ({' | '.join(frames)}))*" if frames else ""


def _never(tools: ToolFormat) -> tuple[str, ...]:
    """What free text does not contain, beside markers."""
    return (tools.body.opening,) if isinstance(tools.body, Addressed) else ()


def _marked(lark: Lark, tools: ToolFormat, functions: Sequence[Function], only_one: bool) -> list[str]:
    """Text up to each kind of marker that begins calls, and the calls."""
    without = dataclasses.replace(tools, section=())
    if isinstance(tools.body, Addressed):  # messages to others begin with the same marker
        return [_addressed(lark, tools, tools.body, function) for function in functions]
    markers = [marker for marker in tools.begin if marker not in tools.direct]
    framed = _framed(lark, tools)
    ways = [f"{framed} {lark.up_to_any(markers)} {_section(lark, without, functions, only_one, opened=True)}"]
    for marker in tools.direct:
        one = " | ".join(lark.rule(_call(lark, tools.body, function, marker)) for function in functions)
        ways.append(f"{framed} {lark.up_to_any((marker,))} {lark.rule(one)}")
    if tools.section:
        ways.append(
            f"{framed} {lark.up_to_any(tools.section[:1])} {_section(lark, tools, functions, only_one, opened=True)}"
        )
    return ways


def calls_or_json(
    tools: ToolFormat,
    functions: Sequence[Function],
    special: Mapping[str, int],
    only_one: bool,
    schema: Mapping[str, Any],
) -> str:
    """Nothing but calls, or nothing but JSON of a schema.

    Raises:
        Inexpressible: as of `calls_only`.
    """
    lark = Lark(special)
    calls = lark.rule(f"{_lead(lark, tools)} {_section(lark, tools, functions, only_one, opened=False)}")
    return lark.write(f"space ({calls} | {lark.rule(lark.json(schema, False))}) space")


def harmony_calls(
    functions: Sequence[Function],
    special: Mapping[str, int],
    must_call: bool,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """A call in gpt-oss's format, after any thoughts; or the answer (of a schema, if there is one), unless it must be a call.

    Raises:
        Inexpressible: the format has no words for one of the functions.
    """
    lark = Lark(special)
    channel, message, end, start = _HARMONY_THOUGHT
    header = f'{lark.text(channel)} ("analysis" | "commentary") {lark.text(message)}'
    thought = f"{header} {lark.until(end)} {lark.text(start)}"
    if not all(re.fullmatch(r"[\w.-]+", function.name) for function in functions):
        raise Inexpressible
    headers = [f"{channel}commentary to=functions.{each.name} <|constrain|>json{message}" for each in functions]
    calls = [f"{lark.text(header)} {_arguments(lark, each)}" for header, each in zip(headers, functions, strict=True)]
    answer = lark.anything() if schema is None else f"space {lark.json(schema, False)} space"
    final = [] if must_call else [f"{lark.text(f'{channel}final{message}')} {answer}"]
    return lark.write(f"({lark.rule(thought)})* ({' | '.join([*map(lark.rule, calls), *final])})")


def _section(lark: Lark, tools: ToolFormat, functions: Sequence[Function], only_one: bool, opened: bool) -> str:
    """Calls with the markers around all of them; `opened`: the first marker of all is written."""
    end = lark.text(_usual(tools.end, lark.special)) if tools.end and tools.has_end and not tools.bare else ""
    begin = lark.text(_usual(tools.begin, lark.special)) if tools.begin and not tools.bare else ""
    body = tools.body
    if isinstance(body, JsonOr):
        body = body.other if body.token is None or body.token in lark.special else body.json
    if isinstance(body, Tags) and body.end in tools.end:
        end = ""
    one = lark.rule(" | ".join(lark.rule(_call(lark, body, function)) for function in functions))
    several = _several(body, one, only_one)
    if several is not None:
        return f"{'' if opened else begin} space {several} space {end}"
    inner = f"{'' if isinstance(body, Addressed) else 'space'} {one} space {end}"
    if tools.section:
        calls = f"{begin} {inner}" if only_one else f"({begin} {inner} space)+"
        return f"{'' if opened else lark.text(tools.section[0])} space {calls} space {lark.text(tools.section[1])}"
    if only_one or opened:
        return inner if opened else f"{begin} {inner}"
    separator = lark.text("".join((tools.separator, *tools.between)))
    return f"{begin} {inner} (space {separator} space {begin} {inner})*"


def _several(body: Body, one: str, only_one: bool) -> str | None:
    """Calls that share one pair of markers; None where each has its own."""
    if isinstance(body, Several):
        return one if only_one else f"{one} (space {one})*"
    is_list = body.is_list if isinstance(body, JsonObject) else isinstance(body, Pythonic)
    if not is_list:
        return None
    brackets = not isinstance(body, Pythonic) or body.brackets
    between = 'space "," space' if brackets else "SPACE"
    calls = one if only_one else f"{one} ({between} {one})*"
    return f'"[" space {calls} space "]"' if brackets else calls


def _usual(markers: tuple[str, ...], special: Mapping[str, int]) -> str:
    return next((marker for marker in markers if marker in special), markers[0])


def _call(lark: Lark, body: Body, function: Function, written: str = "") -> str:
    """One call, without the markers around it. `written`: what of it is written already."""
    match body:
        case JsonObject():
            return _json_object(lark, body, function)
        case Header():
            if not re.fullmatch(body.pattern, body.usual.replace("{name}", function.name).replace("#", "0")):
                raise Inexpressible
            return _header(lark, body, function, written)
        case Addressed():
            opening = lark.text(f"{function.name}{body.after}{body.opening}")
            return f"{opening} space {_call(lark, body.body, function)}"
        case Several():
            space = "" if isinstance(body.body, Tags) else "space"
            return f"{lark.text(body.begin)} {space} {_call(lark, body.body, function)} {space} {lark.text(body.end)}"
        case Tags():
            return tags_call(lark, body, function, written)
        case Pythonic():
            return python_call(lark, function)
        case Braces():
            return braces_call(lark, body, function)
        case Elements():
            return elements_call(lark, body, function)
        case _:
            raise Inexpressible


def _json_object(lark: Lark, body: JsonObject, function: Function) -> str:
    colon, arguments = 'space ":" space', _arguments(lark, function)
    if not body.names:
        return f'"{{" space {lark.text(json.dumps(function.name))} {colon} {arguments} space "}}"'
    name = f"{lark.text(json.dumps(body.names[0]))} {colon} {lark.text(json.dumps(function.name))}"
    if body.ids:
        number = lark.pattern('"[0-9]{1,4}"')
        name = f'({lark.text(json.dumps(body.ids[0]))} {colon} {number} space "," space)? {name}'
    return (
        f'"{{" space {name} space "," space {lark.text(json.dumps(body.arguments[0]))} {colon} {arguments} space "}}"'
    )


def _arguments(lark: Lark, function: Function) -> str:
    return lark.json(prepared(function.parameters), not function.is_strict)


def _header(lark: Lark, body: Header, function: Function, written: str) -> str:
    number = lark.pattern("[0-9]{1,4}") if "#" in body.usual else ""
    before, _, after = body.usual.replace("{name}", function.name).partition("#")
    opening = f"{lark.text((body.before + before).removeprefix(written))} {number} {lark.text(after)}"
    separator = "" if body.separator == "{" else lark.text(body.separator)
    fence = f"space {lark.text(body.fence[0])}" if body.fence[0] else ""
    closing = f"space {lark.text(body.fence[1])}" if body.fence[1] else ""
    return f"{opening} {separator} {fence} space {_arguments(lark, function)} {closing}"
