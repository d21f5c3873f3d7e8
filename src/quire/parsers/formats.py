"""The formats of tool calls by name: how calls are marked and written. (Those of reasoning: `reasoning.py`.)

Facts of models' chat templates and of the names that users of vLLM know. A format is data; nothing here is code.
"""

import dataclasses

from quire.parsers.bodies import Body, Header, JsonObject, JsonOrHeader, Pythonic, Tags
from quire.parsers.reasoning import REASONING, Reasoning

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
        inner: markers that the body looks for, as far as they may be special tokens.
        has_end: usually, one of `end` stands after a call, if there are any.
        has_numbered_ids: the template wants ids such as `functions.get_weather:0`.
    """

    body: Body
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    section: tuple[str, ...] = ()
    bare: bool = False
    separator: str = ""
    inner: tuple[str, ...] = ()
    has_end: bool = True
    has_numbered_ids: bool = False


_JSON = JsonObject()
_JSON_LIST = JsonObject(is_list=True)
_JSON_PARAMETERS = JsonObject(arguments=("parameters", "arguments"))
_HERMES = ToolFormat(_JSON, ("<tool_call>",), ("</tool_call>",))
_QWEN3_CODER = ToolFormat(
    Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", lines=True),
    ("<tool_call>",),
    ("</tool_call>",),
)
_LLAMA_JSON = ToolFormat(_JSON_PARAMETERS, ("<|python_tag|>",), bare=True, separator=";")

TOOLS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "ernie45": _HERMES,
    "xlam": ToolFormat(_JSON_LIST, ("<tool_call>", "[TOOL_CALLS]", "```json"), ("</tool_call>", "```"), bare=True),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "granite": ToolFormat(_JSON_LIST, ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), has_end=False),
    "granite4": _HERMES,
    "granite-20b-fc": ToolFormat(_JSON, ("<function_call>",)),
    "internlm": ToolFormat(
        _JSON_PARAMETERS, ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)
    ),
    "jamba": ToolFormat(_JSON_LIST, ("<tool_calls>",), ("</tool_calls>",)),
    "hunyuan_a13b": ToolFormat(_JSON_LIST, ("<tool_calls>",), ("</tool_calls>",)),
    "phi4_mini_json": ToolFormat(_JSON_LIST, ("functools",)),
    "lfm2": ToolFormat(Pythonic(), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "mistral": ToolFormat(
        JsonOrHeader(
            _JSON_LIST,
            Header("{", pattern=r"\s*(?P<name>[\w.-]+?)\s*(\[CALL_ID\]\w+)?(\[ARGS\])?\s*", usual="{name}[ARGS]"),
            "[ARGS]",
        ),
        ("[TOOL_CALLS]",),
    ),
    "deepseek_v3": ToolFormat(
        Header("\n", before="function<｜tool▁sep｜>", fence="```json"),
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
        has_numbered_ids=True,
    ),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": dataclasses.replace(_QWEN3_CODER, begin=("<seed:tool_call>",), end=("</seed:tool_call>",)),
    "glm45": ToolFormat(
        Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>"),
        ("<tool_call>",),
        ("</tool_call>",),
    ),
    "minimax_m2": ToolFormat(
        Tags(("", ">"), ("<parameter name=", ">"), ("", "</parameter>"), "</invoke>", quoted=True),
        ("<invoke name=",),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "step3": ToolFormat(
        Tags(
            ("function<｜tool_sep｜><steptml:invoke name=", ">"),
            ("<steptml:parameter name=", ">"),
            ("", "</steptml:parameter>"),
            "</steptml:invoke>",
            quoted=True,
        ),
        ("<｜tool_call_begin｜>",),
        ("<｜tool_call_end｜>",),
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        inner=("<｜tool_sep｜>",),
    ),
    "pythonic": ToolFormat(Pythonic(), bare=True),
    "llama4_pythonic": ToolFormat(Pythonic(), ("<|python_start|>",), ("<|python_end|>",), bare=True),
    "olmo3": ToolFormat(Pythonic(brackets=False), ("<function_calls>",), ("</function_calls>",)),
}

PLAIN = ToolFormat(JsonObject(arguments=("parameters", "arguments"), is_list=True), bare=True)
"""Calls of a model without a format of its own, and of functions that its own has no words for."""

HARMONY = ("openai", "openai_gptoss")
"""Names of gpt-oss's format, which is one for reasoning, content and calls together (`harmony.py`)."""
