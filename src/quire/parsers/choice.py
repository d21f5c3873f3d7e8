"""Which formats a model's answers have: what the operator names, else what its chat template shows beyond doubt.

Knows names, and marks in templates.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ConfigError, did_you_mean
from quire.parsers.formats import HARMONY, TOOLS, ToolFormat, with_suffix
from quire.parsers.harmony import MARKERS
from quire.parsers.reasoning import REASONING, Reasoning
from quire.parsers.response_template import NAMES as RESPONSE_TEMPLATE
from quire.parsers.response_template import read_response_template, reasoning_of_template

AUTO, NONE = "auto", "none"

_REASONING_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<seed:think>",), "seed_oss"),
    (("[THINK]",), "mistral"),
    (("Here is my thought process:",), "granite"),
    (("<|channel>",), "gemma4"),
    (("<mm:think>",), "minimax_m3"),
    (("<ifm|think>",), "k2_horizon"),
    (("<|content_thinking|>",), "inkling"),
    (("to=self", "<|message|>", "<|eom|>"), "muse"),
    (("<|plamo:begin_think:plamo|>",), "plamo3"),
    (("<|START_THINKING|>",), "cohere_command4"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<think:",), "hy_v4"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "<response>"), "ernie45"),
    (("◁think▷",), "kimi_k2"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>",), "qwen3"),
)
_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<｜DSML｜function_calls>",), "deepseek_v32"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<ifm|tool_call>",), "k2_horizon"),
    (("<|plamo:begin_tool_request:plamo|>",), "plamo3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<dots_function_call>",), "dots"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|START_ACTION|>",), "cohere_command4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|function_call|>",), "gigachat3"),
    (("function call", "<|role_sep|>"), "gigachat3"),
    (("<tool_sep", "<arg_key"), "hy_v3"),
    (("<tool_calls", "<arg_key"), "hy_v4"),
    (("<function name=", "<param name="), "minicpm5"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<steptml:invoke",), "step3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>",), "internlm"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("functools[",), "phi4_mini_json"),
)
"""Strings of a chat template that together belong to one format only, the rarest first."""


@dataclasses.dataclass(frozen=True)
class AnswerFormats:
    """How a model's answers are read. The names are for people; a format that is None is not looked for.

    Attributes:
        response_template: the checkpoint's own format, which reads all of an answer.
        strict_level: how calls are held to schemas where none has to be made: `auto` (as the request says), `function` (always),
            `parameter` (always, every function as a strict one).
    """

    reasoning_name: str = NONE
    tools_name: str = NONE
    reasoning: Reasoning | None = None
    tools: ToolFormat | None = None
    is_harmony: bool = False
    strict_level: str = AUTO
    response_template: dict[str, Any] | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Every marker, of which some may be special tokens that must not be left out of the text."""
        found = set(MARKERS) if self.is_harmony else set[str]()
        if self.reasoning is not None:
            found |= {*self.reasoning.start, *self.reasoning.end, *self.reasoning.answer, *self.reasoning.again}
            found |= {*self.reasoning.header, *self.reasoning.calls}
        if self.tools is not None:
            found |= {*self.tools.begin, *self.tools.end, *self.tools.section, *self.tools.inner, *self.tools.dropped}
        return frozenset(found)


def choose_formats(reasoning: str, tools: str, template: str | None, strict_level: str = AUTO) -> AnswerFormats:
    """The formats.

    Args:
        reasoning, tools: names, `auto`, or `none`.
        template: the model's chat template.

    Raises:
        ConfigError: no such name.
    """
    template = template or ""
    if reasoning in RESPONSE_TEMPLATE or tools in RESPONSE_TEMPLATE:
        return AnswerFormats(RESPONSE_TEMPLATE[0], RESPONSE_TEMPLATE[0], strict_level=strict_level)
    if reasoning in HARMONY or tools in HARMONY or (AUTO in (reasoning, tools) and _is_harmony(template)):
        return AnswerFormats("openai_gptoss", "openai", is_harmony=True, strict_level=strict_level)
    reasoning = _named(reasoning, REASONING, "reasoning_parser") or _shown(_REASONING_MARKS, template)
    tools = _named(tools, TOOLS, "tool_call_parser") or _shown(_TOOL_MARKS, template)
    if reasoning == NONE and tools in TOOLS and TOOLS[tools].between:
        reasoning = tools  # its messages carry reasoning, content and calls
    found = with_suffix(REASONING[reasoning], template) if reasoning in REASONING else None
    calls = with_suffix(TOOLS[tools], template) if tools in TOOLS else None
    return AnswerFormats(reasoning, tools, found, calls, strict_level=strict_level)


def apply_response_template(formats: AnswerFormats, folder: str) -> AnswerFormats:
    """The formats with the response template of a checkpoint, where it was asked for.

    Raises:
        ConfigError: the checkpoint has none, or it cannot be read.
    """
    if formats.reasoning_name not in RESPONSE_TEMPLATE:
        return formats
    template = read_response_template(folder, "reasoning_parser='hf'")
    return dataclasses.replace(formats, response_template=template, reasoning=reasoning_of_template(template))


def apply_strings(formats: AnswerFormats, start: str, end: str) -> AnswerFormats:
    """The formats with another start marker of the reasoning, and another text that ends it where a budget is spent (empty:
    the format's own). Both together are a format where none is known. gpt-oss has its channels whatever is given.

    Raises:
        ConfigError: no format is known, and only one of the two is given.
    """
    if formats.is_harmony or not (start or end):
        return formats
    if formats.reasoning is None:
        if not (start and end):
            given, missing = ("start", "end") if start else ("end", "start")
            message = (
                f"reasoning_config has reasoning_{given}_str only, and no reasoning format is known for this model: "
                f"give reasoning_{missing}_str as well, or reasoning_parser"
            )
            raise ConfigError(message, setting="reasoning_config")
        return dataclasses.replace(formats, reasoning_name="reasoning_config", reasoning=Reasoning((start,), (end,)))
    known = formats.reasoning
    starts = (start, *(each for each in known.start if each != start)) if start else known.start
    is_paired = known.is_paired and starts == known.start
    reasoning = dataclasses.replace(known, start=starts, is_paired=is_paired, forced=end)
    return dataclasses.replace(formats, reasoning=reasoning)


def _is_harmony(template: str) -> bool:
    return all(mark in template for mark in ("<|channel|>", "<|message|>", "analysis"))


def _named(name: str, known: Collection[str], setting: str) -> str | None:
    if name == AUTO:
        return None
    if name != NONE and name not in known:
        allowed = sorted((AUTO, NONE, *HARMONY, *RESPONSE_TEMPLATE, *known))
        message = f"{setting}={name!r} is not known{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
        raise ConfigError(message, setting=setting)
    return name


def _shown(marks: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    return next((name for strings, name in marks if all(mark in template for mark in strings)), NONE)


def reasoning_of_request(
    reasoning: Reasoning, prompt_end: str, variables: Mapping[str, Any], continues: bool = False
) -> tuple[Reasoning, bool | None]:
    """How the reasoning of an answer is read, and whether the answer begins inside; None: nothing tells, and the format decides.

    Args:
        prompt_end: the end of the prompt's text.
        variables: the template's; a prompt that ends inside the reasoning, or behind it, goes before them.
        continues: the prompt ends within a message that the answer continues.
    """
    reasoning = reasoning.of_request(variables)
    end = prompt_end.rstrip()
    started = [start for start in reasoning.start if end.endswith(start.rstrip())]
    if continues and not started:
        last = max(reasoning.start, key=end.rfind)
        if end.rfind(last) > max(map(end.rfind, reasoning.end)):
            started = [last]
    ended = max((len(each) for each in reasoning.end if end.endswith(each)), default=0)
    if started and len(max(started, key=len)) >= ended:
        return reasoning.only(max(started, key=len)), True
    if ended or reasoning.is_off(variables):
        return reasoning, False
    return (dataclasses.replace(reasoning, implied=False) if reasoning.writes_start else reasoning), None
