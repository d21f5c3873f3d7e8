"""The reasoning formats by name: which markers surround a model's reasoning, and what turns it on or off.

Facts of models' chat templates and of the names that users of vLLM know. A format is data; `stream.py` reads it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.parsers.pieces import Kind
from quire.plugins.registry import Registry


@dataclasses.dataclass(frozen=True)
class Switch:
    """The variables of a chat template that say whether a model reasons.

    Attributes:
        names: variables that turn it on (one of them is true) or off (all that are given are false).
        is_on: what holds if none of them is given.
        off_efforts: values of `reasoning_effort` that turn it off.
        effort: the `reasoning_effort` of a request that has none.
    """

    names: tuple[str, ...] = ("enable_thinking",)
    is_on: bool = True
    off_efforts: tuple[str, ...] = ()
    effort: str = ""

    def reads_on(self, variables: Mapping[str, Any]) -> bool:
        """Whether a model reasons whose template has these variables."""
        if (variables.get("reasoning_effort") or self.effort) in self.off_efforts:
            return False
        given = [bool(variables[name]) for name in self.names if variables.get(name) is not None]
        return any(given) if given else self.is_on


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Where a model reasons.

    Attributes:
        start, end: the markers, each in all its spellings; the first one is the usual.
        implied: an answer begins inside the reasoning, because the template wrote the start already (or the model leaves it
            out). The prompt decides, if it ends with a marker.
        writes_start: the model itself writes the start where the template has not: if the prompt ends without a marker, an
            answer begins outside.
        answer: markers around what follows, which are left out.
        noise: markers that are left out everywhere, and the text with which each ends (empty: it is whole).
        again: markers that begin more reasoning later in the answer.
        header: markers that the header of a message follows, up to the next marker. It is left out. An answer begins with
            one.
        calls: how the model's own calls begin. They end the reasoning of an answer that no calls are looked for in, and are
            content there.
        is_paired: the n-th spelling of the end belongs to the n-th spelling of the start.
        switch: template variables that turn the reasoning off; None: nothing does. An answer that is turned off is content.
        opened_by: a template variable and its value with which an answer begins inside.
        hides: an answer whose reasoning is turned off does not show what it reasons all the same.
        is_hidden: this holds for the request.
        is_content: the reasoning stays in the content, between its markers.
        filled_by: template variables with which an answer that is nothing but reasoning has it as its content.
        fills: the request has such a variable.
        has_suffix: a checkpoint's markers may end with a suffix of its own: `<think:6124c78e>`.
        forced: what is written where a budget for reasoning is spent; empty: `end`.
        own_space: white space next to a marker belongs to the text of these kinds; else to the format.
        ends_trimmed: this does not hold for white space at the reasoning's end.
        recipient: a regular expression of what names a message's recipient in its header, who is neither the user nor the model
            itself. Such a message is content from there on: it is a call, and calls are not looked for.
    """

    start: tuple[str, ...]
    end: tuple[str, ...]
    implied: bool = False
    writes_start: bool = False
    answer: tuple[str, ...] = ()
    noise: tuple[tuple[str, str], ...] = ()
    again: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    is_paired: bool = False
    switch: Switch | None = None
    opened_by: tuple[str, str] | None = None
    hides: bool = False
    is_hidden: bool = False
    is_content: bool = False
    filled_by: tuple[tuple[str, bool], ...] = ()
    fills: bool = False
    has_suffix: bool = False
    forced: str = ""
    own_space: tuple[Kind, ...] = ()
    ends_trimmed: bool = False
    recipient: str = ""

    def ends_of(self, start: str | None) -> tuple[str, ...]:
        """The markers that end what `start` began (None: it was not seen)."""
        if self.is_paired and start in self.start:
            return (self.end[self.start.index(start)],)
        return self.end

    def only(self, start: str) -> "Reasoning":
        """The same with one spelling of the start, and the ends that belong to it."""
        return dataclasses.replace(self, start=(start,), end=self.ends_of(start), is_paired=False, is_hidden=False)

    def of_request(self, variables: Mapping[str, Any]) -> "Reasoning":
        """The same as a request's template variables have it; what the prompt shows goes before that."""
        fills = any(variables.get(name) is value for name, value in self.filled_by)
        implied = self.implied
        if self.opened_by is not None:
            implied = variables.get(self.opened_by[0]) == self.opened_by[1]
        changed = dataclasses.replace(self, fills=fills, implied=implied)
        if self.hides and self.is_off(variables):
            return dataclasses.replace(changed, is_hidden=True, again=self.start, answer=(*self.answer, *self.end))
        return changed

    def is_off(self, variables: Mapping[str, Any]) -> bool:
        """Whether a request's template variables turn it off."""
        return self.switch is not None and not self.switch.reads_on(variables)


NO_REASONING = Reasoning((), ())
"""Of answers in which no reasoning is looked for."""
_THINK = Reasoning(("<think>",), ("</think>",))
_THINKING = dataclasses.replace(_THINK, implied=True)
_EITHER = Switch(("thinking", "enable_thinking"))
_QWEN3_CALLS = ("<tool_call>\n<function=", "<tool_call><function=", "<tool_call>\n{", "<tool_call>{")
_QWEN3 = dataclasses.replace(
    _THINKING, writes_start=True, switch=Switch(), calls=_QWEN3_CALLS, own_space=("reasoning",)
)
_GLM = dataclasses.replace(_THINKING, writes_start=True, switch=_EITHER, again=("<think>",))
_DEEPSEEK_V3 = dataclasses.replace(_THINKING, switch=dataclasses.replace(_EITHER, is_on=False))
_DEEPSEEK_V4 = dataclasses.replace(
    _THINKING,
    switch=dataclasses.replace(_EITHER, off_efforts=("none",)),
    again=("<think>",),
    calls=("<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),
)
_NEMOTRON = dataclasses.replace(
    _THINKING,
    calls=_QWEN3_CALLS,
    filled_by=(("enable_thinking", False), ("force_nonempty_content", True)),
)
_EFFORT = Switch((), off_efforts=("no_think",))
_RESERVED = tuple((f"<{bar}reserved_{index}{bar}>", "") for bar in ("", "|") for index in range(12, 16))
_COHERE = Reasoning(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    noise=(("<co>", ""), ("</co:", ">")),
    calls=("<|START_ACTION|>",),
)
_MUSE_ANSWER = ("to=user<|message|>", "to=commentary<|message|>")
_MUSE_ENDS = ("<|eom|>", "<|eot|>", "<|start|>")
_MUSE = Reasoning(
    ("to=self<|message|>", "<|message|>"),
    (*_MUSE_ENDS, *_MUSE_ANSWER),
    answer=_MUSE_ANSWER,
    again=("to=self<|message|>", "<|message|>"),
    header=(*_MUSE_ENDS, "to=developer<|message|>"),
    own_space=("reasoning", "content"),
    recipient=r"to=(?!(?:commentary|developer)\b)",
)

REASONING: Registry[Reasoning] = Registry(
    "reasoning format",
    "reasoning_parser",
    {
        "deepseek_r1": _THINKING,
        "step5": _THINKING,
        "step3": _THINKING,
        "step3p5": dataclasses.replace(_THINKING, own_space=("reasoning", "content"), ends_trimmed=True),
        "olmo3": dataclasses.replace(_THINKING, own_space=("reasoning", "content")),
        "minimax_m2": dataclasses.replace(_THINKING, calls=("<minimax:tool_call>",)),
        "minimax_m2_append_think": dataclasses.replace(_THINKING, is_content=True),
        "ernie45": dataclasses.replace(_THINKING, answer=("<response>", "</response>")),
        "seed_oss": Reasoning(("<seed:think>",), ("</seed:think>",), implied=True, switch=Switch()),
        "qwen3": _QWEN3,
        "mimo": _QWEN3,
        "minicpmv": dataclasses.replace(_QWEN3, noise=(("<|im_end|>", ""), *_RESERVED), hides=True),
        "nemotron_v3": _NEMOTRON,
        "granite_thinking_parser": _NEMOTRON,
        "glm45": _GLM,
        "glm47": _GLM,
        "ling3": dataclasses.replace(_GLM, writes_start=False),
        "deepseek_v3": _DEEPSEEK_V3,
        "poolside_v1": _DEEPSEEK_V3,
        "holo2": dataclasses.replace(_DEEPSEEK_V3, switch=_EITHER),
        "deepseek_v4": _DEEPSEEK_V4,
        "deepseek_v41": _DEEPSEEK_V4,
        "hy_v3": dataclasses.replace(
            _THINKING, switch=dataclasses.replace(_EFFORT, effort="no_think"), has_suffix=True
        ),
        "hy_v4": dataclasses.replace(_THINKING, switch=_EFFORT, has_suffix=True),
        "hunyuan_a13b": dataclasses.replace(_THINK, answer=("<answer>", "</answer>")),
        "granite": Reasoning(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            own_space=("reasoning", "content"),
        ),
        "mistral": Reasoning(("[THINK]", "<think>"), ("[/THINK]", "</think>"), again=("[THINK]",), is_paired=True),
        "kimi_k2": Reasoning(
            ("<think>", "◁think▷"),
            ("</think>", "◁/think▷"),
            implied=True,
            writes_start=True,
            calls=("<|tool_calls_section_begin|>",),
            is_paired=True,
            switch=_EITHER,
        ),
        "kimi_k3": Reasoning(
            ("<|open|>think<|sep|>",),
            ("<|close|>think<|sep|>",),
            implied=True,
            answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
            switch=_EITHER,
        ),
        "k2_horizon": Reasoning(
            ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
            ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
            implied=True,
            calls=("<ifm|tool_calls>",),
            is_paired=True,
            own_space=("reasoning",),
        ),
        "minimax_m3": Reasoning(
            ("<mm:think>",), ("</mm:think>",), again=("<mm:think>",), opened_by=("thinking_mode", "enabled")
        ),
        "gemma4": Reasoning(
            ("<|channel>", "<|channel>thought\n", "thought\n"),
            ("<channel|>",),
            answer=("<channel|>", "<turn|>"),
            calls=("<|tool_call>",),
            again=("<|channel>", "<|channel>thought\n"),
        ),
        "plamo3": Reasoning(
            ("<|plamo:begin_think:plamo|>",),
            ("<|plamo:end_think:plamo|>",),
            implied=True,
            again=("<|plamo:begin_think:plamo|>",),
            calls=("<|plamo:begin_tool_requests:plamo|>",),
            answer=("<|plamo:tag|>", "<|plamo:end_think:plamo|>"),
            switch=Switch(),
            own_space=("reasoning", "content"),
        ),
        "inkling": Reasoning(
            ("<|content_thinking|>",),
            ("<|end_message|>", "<|content_model_end_sampling|>"),
            answer=(
                *("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
                *("<|end_message|>", "<|content_model_end_sampling|>"),
            ),
            again=("<|content_thinking|>",),
            own_space=("reasoning", "content"),
            header=("<|message_model|>",),
            calls=("<|content_invoke_tool_json|>",),
        ),
        "muse": _MUSE,
        "musespark1x": _MUSE,
        "muse_glimmer": dataclasses.replace(
            _MUSE,
            start=_MUSE.start[:1],
            end=(*_MUSE_ENDS, _MUSE_ANSWER[0]),
            answer=(_MUSE_ANSWER[0], "<|message|>"),
            again=_MUSE.start[:1],
            header=(*_MUSE_ENDS, "to=commentary<|message|>", "to=developer<|message|>"),
        ),
        "cohere_command3": _COHERE,
        "cohere_command4": dataclasses.replace(_COHERE, implied=True),
    },
)
