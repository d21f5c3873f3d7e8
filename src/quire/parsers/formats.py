"""The formats of tool calls by name: how calls are marked and written. (Those of reasoning: `reasoning.py`.)

Facts of models' chat templates and of the names that users of vLLM know. A format is data; nothing here is code.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

from quire.errors import RequestError
from quire.parsers.bodies import Addressed, Body, Header, JsonObject, JsonOr, Several
from quire.parsers.braces import Braces
from quire.parsers.elements import Elements
from quire.parsers.pythonic import Pythonic
from quire.parsers.reasoning import REASONING, Reasoning
from quire.parsers.tags import TagHeader, Tags
from quire.plugins.registry import Registry

__all__ = ["HARMONY", "PLAIN", "REASONING", "TOOLS", "Reasoning", "ToolFormat"]


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How tool calls are written.

    Attributes:
        begin: markers of which each begins a call (or a list of calls, as the body says). Of these and of `end`, the first
            is the usual one.
        end: markers that end one; further text until the next marker is dropped only if it is white space.
        section: markers around all calls, which carry nothing.
        bare: a call may also begin without a marker, where the answer's content begins; calls that are asked for do.
        separator: between calls that share one pair of markers.
        between: parts of the usual text between two calls; the last of them may come before the first call. They
            belong to the messages that calls are in, and so to the reasoning format of the same name.
        inner: markers that the body looks for, as far as they may be special tokens.
        has_end: usually, one of `end` follows a call, if there are any.
        direct: those of `begin` that the body reads itself: a call may begin with them although another marker is usual.
        dropped: more markers that carry nothing.
        frames: markers around text, which the reasoning format of the same name reads.
        keeps_space: white space before the first call belongs to the content; else to the format.
        only_offered: only functions that the request offers are called; other names are content.
        ids: how the template wants the calls' ids: `numbered` is `functions.get_weather:0`, counted through the conversation;
            `short` is nine letters and digits.
        has_suffix: a checkpoint's markers may end with a suffix of its own: `<tool_call:6124c78e>`.
        whole: a call is handed on when it is whole, with `end` behind it; else it is content. A value in quotes that the
            function's schema has as something else is read as that.
        checks: parameters that the schema does not name are left out; a call without a required one is none. Such calls are
            handed on whole.
        ends_turn: text behind the first call is left out.
        drops_cut: a marker, or a call without its name, that is cut off at the answer's end is left out.
        hides: calls that a request does not want are left out; else they are content, unchanged.
        marks_only_calls: a marker without a call behind it (or before it) is left out, too.
        variants: a template variable, and the body for each of its values. The first one is usual.
    """

    body: Body
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    section: tuple[str, ...] = ()
    bare: bool = False
    separator: str = ""
    between: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    has_end: bool = True
    direct: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    keeps_space: bool = False
    only_offered: bool = False
    ids: Literal["any", "numbered", "short"] = "any"
    has_suffix: bool = False
    whole: bool = False
    checks: bool = False
    ends_turn: bool = False
    drops_cut: bool = False
    hides: bool = False
    marks_only_calls: bool = False
    variants: tuple[str, tuple[tuple[str, Body], ...]] = ("", ())

    def of_request(self, variables: Mapping[str, Any]) -> "ToolFormat":
        """The same as a request's template variables have it.

        Raises:
            RequestError: a variable has a value that the format does not know.
        """
        name, bodies = self.variants
        if name not in variables:
            return self
        body = dict(bodies).get(value) if isinstance(value := variables[name], str) else None
        if body is None:
            allowed = ", ".join(repr(each) for each, _ in bodies)
            message = f"chat_template_kwargs.{name}={value!r} is not supported; allowed: {allowed}"
            raise RequestError(message, param="chat_template_kwargs")
        return dataclasses.replace(self, body=body)


FormatT = TypeVar("FormatT", ToolFormat, Reasoning)


def with_suffix(found: FormatT, template: str) -> FormatT:
    """The same format with the suffix that a chat template has behind the markers' names."""
    suffix = re.search(r"<(?:think|tool_calls?)(:[^\s>'\"]+)>", template) if found.has_suffix else None
    return found if suffix is None else _suffixed(found, suffix[1])


def _suffixed(part: Any, suffix: str) -> Any:
    """A format, or a part of one, whose markers `<…>` all end with a suffix."""
    if isinstance(part, str):
        return f"{part[:-1]}{suffix}>" if part.startswith("<") and part.endswith(">") else part
    if isinstance(part, tuple):
        return tuple(_suffixed(each, suffix) for each in cast("tuple[Any, ...]", part))
    if isinstance(part, ToolFormat | Reasoning | Tags):
        changes = {field.name: _suffixed(getattr(part, field.name), suffix) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **changes)
    return part


_JSON = JsonObject()
_JSON_LIST = JsonObject(is_list=True)
_JSON_PARAMETERS = JsonObject(arguments=("parameters", "arguments"))
_HERMES = ToolFormat(_JSON, ("<tool_call>",), ("</tool_call>",))
_NAMED = TagHeader('"{name}"')
_QWEN3_TAGS = Tags(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", lines=True, runs_on=True
)
_QWEN3_CODER = ToolFormat(
    _QWEN3_TAGS,
    ("<tool_call>", "<function="),
    ("</tool_call>",),
    direct=("<function=",),
)
_LLAMA_JSON = ToolFormat(_JSON_PARAMETERS, ("<|python_tag|>", "{"), bare=True, separator=";", direct=("{",))
_GLM_TAGS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
_GLM = ToolFormat(_GLM_TAGS, ("<tool_call>",), ("</tool_call>",))
_HUNYUAN = dataclasses.replace(_GLM, section=("<tool_calls>", "</tool_calls>"), has_suffix=True)

_K2_TAGS = Tags(
    ("", ""),
    ("<ifm|arg_key>", "</ifm|arg_key>"),
    ("<ifm|arg_value>", "</ifm|arg_value>"),
    "</ifm|tool_call>",
    exact=True,
)
_K2_TYPED = dataclasses.replace(_K2_TAGS, type=("<ifm|arg_type>", "</ifm|arg_type>"))
_K2_BODIES = (
    ("xml", Several("<ifm|tool_call>", _K2_TAGS)),
    ("json", Several("<ifm|tool_call>", _JSON, "</ifm|tool_call>")),
    ("xml_typed", Several("<ifm|tool_call>", _K2_TYPED)),
)

_COHERE = ToolFormat(
    JsonObject(names=("tool_name",), arguments=("parameters",), ids=("tool_call_id",), is_list=True),
    ("<|START_ACTION|>",),
    ("<|END_ACTION|>",),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    hides=True,
)


def _dsml(section: str, space: str = "", other_sections: tuple[str, ...] = ()) -> ToolFormat:
    """DeepSeek's markup: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">…`."""
    mark = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return ToolFormat(
        Tags(
            ("", ">"),
            (f"{mark[0]}parameter", ">"),
            ("", f"{mark[1]}parameter>"),
            f"{mark[1]}invoke>",
            name_header=TagHeader('name="{name}"'),
            key_header=TagHeader(' name="{name}" string="{is_text}"'),
            runs_on=True,
            guesses=True,
        ),
        (f"{mark[0]}invoke ",),
        section=(f"{mark[0]}{section}>", f"{mark[1]}{section}>"),
        inner=("｜DSML｜",),
        keeps_space=True,
        ends_turn=True,
        dropped=tuple(f"{mark[0]}{each}>" for each in other_sections),
    )


_MUSE = ToolFormat(
    Addressed(
        "<|message|>",
        "<atem:function_calls>",
        Several(
            "<atem:invoke ",
            Tags(
                ("", ">"),
                ("<atem:parameter ", ">"),
                ("", "</atem:parameter>"),
                "</atem:invoke>",
                name_header=TagHeader('name="{name}"'),
                key_header=TagHeader('name="{name}"'),
                guesses=True,
            ),
        ),
    ),
    ("to=",),
    ("</atem:function_calls>",),
    between=("<|eom|>", "<|start|>assistant "),
    inner=("<|message|>",),
    frames=("<|message|>", "<|eom|>", "<|eot|>", "<|start|>"),
)

TOOLS: Registry[ToolFormat] = Registry(
    "tool-call format",
    "tool_call_parser",
    {
        "hermes": _HERMES,
        "qwen3_json": _HERMES,
        "ernie45": _HERMES,
        "xlam": ToolFormat(
            _JSON_LIST,
            ("<tool_call>", "[TOOL_CALLS]", "```json", "["),
            ("</tool_call>", "```"),
            bare=True,
            direct=("[",),
        ),
        "llama3_json": _LLAMA_JSON,
        "llama4_json": _LLAMA_JSON,
        "granite": ToolFormat(_JSON_LIST, ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), has_end=False),
        "granite4": _HERMES,
        "granite-20b-fc": ToolFormat(_JSON, ("<function_call>",)),
        "internlm": ToolFormat(
            _JSON_PARAMETERS, ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)
        ),
        "jamba": ToolFormat(_JSON_LIST, ("<tool_calls>",), ("</tool_calls>",)),
        "hunyuan_a13b": ToolFormat(_JSON_LIST, ("<tool_calls>",), ("</tool_calls>",), keeps_space=True, ends_turn=True),
        "phi4_mini_json": ToolFormat(_JSON_LIST, ("functools",)),
        "lfm2": ToolFormat(Pythonic(), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        "mistral": ToolFormat(
            JsonOr(
                dataclasses.replace(_JSON_LIST, nameless=True),
                Header("{", pattern=r"\s*(?P<name>[\w.-]*?)\s*(\[CALL_ID\]\w+)?(\[ARGS\])?\s*", usual="{name}[ARGS]"),
                "[ARGS]",
            ),
            ("[TOOL_CALLS]",),
            inner=("[ARGS]", "[CALL_ID]"),
            ids="short",
            ends_turn=True,
            marks_only_calls=True,
        ),
        "deepseek_v3": ToolFormat(
            Header("\n", before="function<｜tool▁sep｜>", fence=("```json", "```")),
            ("<｜tool▁call▁begin｜>",),
            ("<｜tool▁call▁end｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=("<｜tool▁sep｜>",),
        ),
        "deepseek_v31": ToolFormat(
            Header("<｜tool▁sep｜>"),
            ("<｜tool▁call▁begin｜>",),
            ("<｜tool▁call▁end｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=("<｜tool▁sep｜>",),
            ends_turn=True,
        ),
        "kimi_k2": ToolFormat(
            Header(
                "<|tool_call_argument_begin|>",
                pattern=r"\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*",
                usual="functions.{name}:#",
            ),
            ("<|tool_call_begin|>",),
            ("<|tool_call_end|>",),
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=("<|tool_call_argument_begin|>",),
            keeps_space=True,
            ids="numbered",
            ends_turn=True,
        ),
        "qwen3_coder": _QWEN3_CODER,
        "qwen3_xml": _QWEN3_CODER,
        "step3p5": _QWEN3_CODER,
        "step5": _QWEN3_CODER,
        "mimo": dataclasses.replace(_QWEN3_CODER, body=dataclasses.replace(_QWEN3_TAGS, lines=False)),
        "seed_oss": dataclasses.replace(
            _QWEN3_CODER, begin=("<seed:tool_call>", "<function="), end=("</seed:tool_call>",)
        ),
        "glm45": _GLM,
        "glm47": _GLM,
        "ling3": _GLM,
        "poolside_v1": dataclasses.replace(_GLM, body=dataclasses.replace(_GLM_TAGS, guesses=True)),
        "minimax_m2": ToolFormat(
            Tags(
                ("", ">"),
                ("<parameter name=", ">"),
                ("", "</parameter>"),
                "</invoke>",
                name_header=_NAMED,
                key_header=_NAMED,
            ),
            ("<invoke name=",),
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
            keeps_space=True,
            only_offered=True,
        ),
        "step3": ToolFormat(
            Tags(
                ("<steptml:invoke name=", ">"),
                ("<steptml:parameter name=", ">"),
                ("", "</steptml:parameter>"),
                "</steptml:invoke>",
                prefix="function<｜tool_sep｜>",
                name_header=_NAMED,
                key_header=_NAMED,
            ),
            ("<｜tool_call_begin｜>",),
            ("<｜tool_call_end｜>",),
            ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            inner=("<｜tool_sep｜>",),
            dropped=("<｜tool_sep｜>",),
        ),
        "pythonic": ToolFormat(Pythonic(), bare=True),
        "llama4_pythonic": ToolFormat(Pythonic(), ("<|python_start|>",), ("<|python_end|>",), bare=True),
        "inkling": ToolFormat(
            JsonObject(arguments=("args", "arguments", "parameters")),
            ("<|content_invoke_tool_json|>",),
            ("<|end_message|>", "<|content_model_end_sampling|>"),
            between=("<|message_model|>",),
            frames=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
            hides=True,
        ),
        "muse": _MUSE,
        "muse_glimmer": _MUSE,
        "musespark1x": _MUSE,
        "longcat": dataclasses.replace(_HERMES, begin=("<longcat_tool_call>",), end=("</longcat_tool_call>",)),
        "apertus": ToolFormat(
            JsonObject(names=(), is_list=True), ("<|tools_prefix|>",), ("<|tools_suffix|>",), keeps_space=True
        ),
        "cohere_command3": _COHERE,
        "cohere_command4": _COHERE,
        "gigachat3": ToolFormat(
            _JSON,
            ("<|function_call|>", "function call<|role_sep|>\n"),
            ("</s>",),
            has_end=False,
            dropped=("<|message_sep|>",),
            inner=("<|role_sep|>",),
        ),
        "dots": ToolFormat(
            JsonOr(
                _JSON_LIST,
                Several(
                    "<invoke ",
                    Tags(
                        ("", ">"),
                        ("<parameter ", ">"),
                        ("", "</parameter>"),
                        "</invoke>",
                        name_header=TagHeader('name="{name}"'),
                        key_header=TagHeader('name="{name}"'),
                    ),
                ),
            ),
            ("<dots_function_call>",),
            ("</dots_function_call>",),
            only_offered=True,
            keeps_space=True,
            marks_only_calls=True,
        ),
        "deepseek_v32": _dsml("function_calls"),
        "deepseek_v4": _dsml("tool_calls", other_sections=("toolcalls", "tool")),
        "deepseek_v41": _dsml("calls", space=" "),
        "kimi_k3": ToolFormat(
            Tags(
                ("", "<|sep|>"),
                ("<|open|>argument ", "<|sep|>"),
                ("", "<|close|>argument<|sep|>"),
                "<|close|>call<|sep|>",
                name_header=TagHeader('tool="{name}" index="#"'),
                key_header=TagHeader('key="{name}" type="{type}"'),
            ),
            ("<|open|>call ",),
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            inner=("<|open|>", "<|close|>", "<|sep|>"),
            dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
            drops_cut=True,
            hides=True,
        ),
        "k2_horizon": ToolFormat(
            _K2_BODIES[0][1],
            ("<ifm|tool_calls>",),
            ("</ifm|tool_calls>",),
            inner=("<ifm|tool_call>", "</ifm|tool_call>"),
            only_offered=True,
            whole=True,
            variants=("tool_call_format", _K2_BODIES),
        ),
        "hy_v3": dataclasses.replace(
            _HUNYUAN, body=dataclasses.replace(_GLM_TAGS, name=("", "<tool_sep>")), inner=("<tool_sep>",)
        ),
        "hy_v4": _HUNYUAN,
        "minicpm5": ToolFormat(
            Tags(
                ("", ">"),
                ("<param", ">"),
                ("", "</param>"),
                "</function>",
                name_header=TagHeader(' name="{name}"'),
                key_header=TagHeader(' name="{name}"'),
                strips=True,
                exact=True,
            ),
            ("<function",),
            only_offered=True,
            whole=True,
            checks=True,
        ),
        "minimax_m3": ToolFormat(
            Elements("]<]minimax[>["),
            ("]<]minimax[>[<invoke name=",),
            section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
            inner=("]<]minimax[>[",),
            keeps_space=True,
            ends_turn=True,
        ),
        "gemma4": ToolFormat(
            Braces('<|"|>'), ("<|tool_call>",), ("<tool_call|>",), inner=('<|"|>',), dropped=("<turn|>",)
        ),
        "functiongemma": ToolFormat(
            Braces("<escape>", quotes_all=True),
            ("<start_function_call>",),
            ("<end_function_call>",),
            inner=("<escape>",),
        ),
        "plamo3": ToolFormat(
            Header(
                "<|plamo:end_tool_name:plamo|>",
                before="<|plamo:begin_tool_name:plamo|>",
                fence=(
                    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                    "<|plamo:end_tool_arguments:plamo|>",
                ),
            ),
            ("<|plamo:begin_tool_request:plamo|>", "<|plamo:begin_tool_name:plamo|>"),
            ("<|plamo:end_tool_request:plamo|>",),
            ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
            inner=("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>"),
            direct=("<|plamo:begin_tool_name:plamo|>",),
            dropped=("<|plamo:tag|>",),
            drops_cut=True,
            hides=True,
        ),
        "olmo3": ToolFormat(Pythonic(brackets=False), ("<function_calls>",), ("</function_calls>",)),
    },
)

PLAIN = ToolFormat(JsonObject(arguments=("parameters", "arguments"), is_list=True), bare=True)
"""Calls of a model without a format of its own, and of functions that its own has no words for."""

NO_CALLS = ToolFormat(JsonObject())
"""Of answers in which no calls are looked for."""

HARMONY = ("openai", "openai_gptoss")
"""Names of gpt-oss's format, which is one for reasoning, content and calls together (`harmony.py`)."""
