"""Reasoning: what turns it on, where it ends, and that a call within it is made."""

import itertools
import json
import random

import pytest
from tests.parsers.test_formats import CASES, TOOL_LIST, cuts, joined, parse

from quire.errors import ConfigError
from quire.parsers.choice import AnswerFormats, apply_strings, choose_formats, reasoning_of_request
from quire.parsers.formats import TOOLS
from quire.parsers.harmony import MARKERS
from quire.parsers.reasoning import REASONING
from quire.parsers.stream import AnswerParser, parse_answer

OFF = {"enable_thinking": False}
ON = {"enable_thinking": True}


def read(name, text, variables=None, prompt="", **more):
    """(reasoning, content) of an answer to a prompt with this end."""
    reasoning, inside = reasoning_of_request(REASONING[name], prompt, variables or {})
    parts = list(cuts(text, every=5))
    found = [parse(each, reasoning=reasoning, in_reasoning=inside, **more)[:2] for each in parts]
    assert found.count(found[0]) == len(found), "wherever the text is cut"
    return found[0]


@pytest.mark.parametrize(
    ("name", "variables", "is_on"),
    [
        ("qwen3", {}, True),
        ("qwen3", OFF, False),
        ("seed_oss", OFF, False),
        ("mimo", OFF, False),
        ("nemotron_v3", OFF, True),
        ("glm45", {"thinking": False}, False),
        ("glm45", {"thinking": False, "enable_thinking": True}, True),
        ("kimi_k2", OFF, False),
        ("kimi_k3", {"thinking": False}, False),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("deepseek_v3", ON, True),
        ("poolside_v1", {}, False),
        ("holo2", {}, True),
        ("holo2", {"thinking": False}, False),
        ("deepseek_v4", {}, True),
        ("deepseek_v4", {"enable_thinking": True, "reasoning_effort": "none"}, False),
        ("deepseek_v41", {"thinking": False}, False),
        ("hy_v3", {}, False),
        ("hy_v3", {"reasoning_effort": "high"}, True),
        ("hy_v4", {}, True),
        ("hy_v4", {"reasoning_effort": "no_think"}, False),
        ("step3p5", OFF, True),
        ("deepseek_r1", OFF, True),
    ],
)
def test_a_request_s_template_variables_turn_reasoning_on_and_off(name, variables, is_on):
    fmt = REASONING[name].of_request(variables)
    assert REASONING[name].is_off(variables) is not is_on
    end = fmt.end[0]
    text = f"Because.{end}So."
    found = parse([text], reasoning=fmt, in_reasoning=None if is_on else False)
    assert found == (("Because.", "So.", []) if is_on else ("", text, []))


@pytest.mark.parametrize("name", [name for name in REASONING if not REASONING[name].is_content])
def test_a_prompt_that_ends_inside_the_reasoning_or_behind_it_decides(name):
    fmt = REASONING[name]
    for start, (end, *_) in ((start, fmt.ends_of(start)) for start in fmt.start):
        for variables in ({}, OFF, {"thinking": False}, {"reasoning_effort": "no_think"}):
            assert read(name, f"Because.{end} So.", variables, f"hi<assistant>{start}\n")[0] == "Because."
            assert read(name, "So.", variables, f"hi<assistant>{start}\n\n{end}\n\n") == ("", "So.")


def test_a_model_that_writes_the_start_itself_answers_at_once_where_it_does_not():
    assert read("qwen3", "So.", prompt="<|im_start|>assistant\n") == ("", "So.")
    assert read("qwen3", "<think>Why?</think>So.", prompt="<|im_start|>assistant\n") == ("Why?", "So.")
    assert read("qwen3", "<think>Why?</think>So.", OFF, "<|im_start|>assistant\n") == ("Why?", "So.")
    assert read("deepseek_r1", "Why?</think>So.", prompt="<｜Assistant｜>") == ("Why?", "So.")


def test_a_continued_message_goes_on_inside_its_reasoning():
    prompt = "user: what is <think>? assistant: <think>It is"
    reasoning, inside = reasoning_of_request(REASONING["qwen3"], prompt, {}, continues=True)
    assert inside is True
    assert parse([" a marker.</think>So."], reasoning=reasoning, in_reasoning=inside) == (" a marker.", "So.", [])
    assert reasoning_of_request(REASONING["qwen3"], prompt, {})[1] is None
    assert reasoning_of_request(REASONING["qwen3"], prompt + "</think>So", {}, continues=True)[1] is None


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("minimax_m3", "</mm:think>So.", ("", "So.")),
        ("minimax_m3", "A</mm:think>B", ("", "A</mm:think>B")),
        ("minimax_m3", "A <mm:think>why</mm:think> B", ("why", "A  B")),
        ("gemma4", "Before\n<|channel>why<channel|>\nB<|channel>so<channel|>\n", ("whyso", "Before\n\nB")),
        ("gemma4", "<|channel>thought\nWhy\n<channel|>So.", ("Why", "So.")),
        ("gemma4", "<|channel>thousand reasons<channel|>So.", ("thousand reasons", "So.")),
        ("gemma4", "<|channel>thought\n<channel|>", ("", "")),
        ("gemma4", "So<channel|>.", ("", "So.")),
        ("glm45", "<think>a</think>b<think>c</think>d", ("ac", "bd")),
        ("qwen3", "<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d")),
        ("mistral", "[THINK]a </think> b[/THINK]c", ("a </think> b", "c")),
        ("mistral", "<think>a</think>c", ("a", "c")),
        ("k2_horizon", "<ifm|think_fast>a</ifm|think>b</ifm|think_fast>c", ("a</ifm|think>b", "c")),
        (
            "kimi_k3",
            "why<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>",
            ("why", "So."),
        ),
        (
            "inkling",
            "<|message_model|><|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>",
            ("a", "b"),
        ),
        (
            "inkling",
            "f<|content_text|>b<|end_message|><|message_model|>g<|content_thinking|>c<|end_message|>",
            ("c", "b"),
        ),
        ("inkling", "no markers at all", ("", "no markers at all")),
        ("muse", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", ("a", "b")),
        ("muse", "<|message|>a<|eom|>to=commentary<|message|>b<|eom|>to=user<|message|>c<|eot|>", ("a", "bc")),
        ("muse", " to=self<|message|>a<|eom|>to=developer<|message|>x<|eom|>to=user<|message|>b", ("a", "b")),
        ("muse", " to=self<|message|>a to=user<|message|>b", ("a ", "b")),
        ("muse", "to=commentary<|message|>a <|eom|><|start|>assistant to=user<|message|>b", ("", "a b")),
        (
            "muse",
            "to=self<|message|>a<|eom|><|start|>assistant to=f<|message|><x>b</x><|eom|>",
            ("a", "to=f<|message|><x>b</x>"),
        ),
        ("muse", "an answer <|eom|>to=user<|message|>b", ("", "an answer b")),
        ("inkling", "an answer<|end_message|>", ("", "an answer")),
        ("gemma4", "thought\nWhy\n<channel|>So.", ("Why", "So.")),
        ("step3p5", "\nWhy? \n</think>\nSo.", ("\nWhy?", "\nSo.")),
        ("muse_glimmer", " to=self<|message|>a<|eom|>to=commentary<|message|>x<|eom|>to=user<|message|>b", ("a", "b")),
        ("muse", "plain", ("", "plain")),
        ("ernie45", "a\n</think>\n\n<response>\nb\n</response>\n", ("a", "b")),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>", ("a", "b")),
        ("minicpmv", "<think>a <|im_end|>c</think>b<reserved_12> d", ("a c", "b d")),
        ("cohere_command3", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", ("a", "b")),
        (
            "cohere_command3",
            "<|START_THINKING|>a <co>b</co: 1:[0]> c<|END_THINKING|><|START_RESPONSE|>d <co>e</co: 0:[1,2]>.",
            ("a b c", "d e."),
        ),
        ("cohere_command4", "a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", ("a", "b")),
        ("cohere_command4", "plain", ("plain", "")),
        ("cohere_command3", "plain", ("", "plain")),
        ("minimax_m2_append_think", "a\n</think>\n\nb", ("", "<think>a\n</think>\n\nb")),
        ("minimax_m2_append_think", "<think>\na</think>b", ("", "<think>\na</think>b")),
    ],
)
def test_what_is_special_about_a_format(name, text, found):
    assert read(name, text) == found


def test_a_variable_of_the_template_says_that_an_answer_begins_inside():
    assert read("minimax_m3", "a</mm:think>b", {"thinking_mode": "enabled"}) == ("a", "b")
    assert read("minimax_m3", "a</mm:think>b", {"thinking_mode": "adaptive"}) == ("", "a</mm:think>b")


@pytest.mark.parametrize("name", ["nemotron_v3", "granite_thinking_parser"])
def test_an_answer_without_content_has_its_reasoning_as_content_where_a_request_says_so(name):
    for variables in ({"force_nonempty_content": True}, OFF):
        fmt = REASONING[name].of_request(variables)
        for parts in cuts("Only thoughts"):
            assert parse(parts, reasoning=fmt) == ("Only thoughts", "Only thoughts", [])
        answer = parse_answer("Only thoughts</think>\n", reasoning=fmt)
        assert (answer.reasoning, answer.content) == ("", "Only thoughts")
        assert parse(["Thoughts</think>So."], reasoning=fmt) == ("Thoughts", "So.", [])
    fmt = REASONING[name].of_request({})
    assert parse(["Only thoughts"], reasoning=fmt) == ("Only thoughts", "", [])


def test_a_checkpoint_s_markers_have_the_suffix_that_its_template_has():
    template = "{% if on %}{{ '<think:6124c78e>' }}{% else %}{{ '<think:6124c78e></think:6124c78e>' }}{% endif %}"
    formats = choose_formats("hy_v4", "none", template)
    assert formats.reasoning is not None and formats.reasoning.end == ("</think:6124c78e>",)
    assert choose_formats("hy_v4", "none", "<think>").reasoning == REASONING["hy_v4"]
    assert choose_formats("qwen3", "none", template).reasoning == REASONING["qwen3"]


MARKED = [
    name
    for name in CASES
    if TOOLS[name].begin and CASES[name][0].lstrip().startswith((*TOOLS[name].begin, *TOOLS[name].section))
]
THINKING = [name for name in REASONING if not REASONING[name].is_content]


def test_a_call_within_unclosed_reasoning_is_made():
    """Every reasoning format with a few formats of calls, every format of calls with a few of reasoning."""
    draw = random.Random(5)
    pairs = {(one, draw.choice(MARKED)) for one in THINKING} | {(draw.choice(THINKING), one) for one in MARKED}
    for name, tools in sorted(pairs | {("qwen3", "qwen3_coder"), ("kimi_k2", "kimi_k2")}):
        text, calls = CASES[tools]
        answer = f"{REASONING[name].start[0]}I need to look.\n\n{text}"
        for parts in itertools.islice(cuts(answer, seed=1, every=11), 0, None, 2):
            reasoning, content, found = parse(parts, reasoning=REASONING[name], tools=TOOLS[tools], offered=TOOL_LIST)
            thought = "I need to look.\n\n" if "reasoning" in REASONING[name].own_space else "I need to look."
            thought = thought.rstrip() if REASONING[name].ends_trimmed else thought
            assert (reasoning.rstrip("\n"), content.strip()) == (thought.rstrip("\n"), ""), (name, tools, parts)
            assert reasoning.startswith(thought), (name, tools, parts)
            assert [(function, json.loads(arguments)) for function, arguments in found] == calls, (name, tools)


@pytest.mark.parametrize("tools", MARKED)
def test_a_model_may_write_about_calls_in_its_reasoning(tools):
    fmt, (call, calls) = TOOLS[tools], CASES[tools]
    marker = fmt.begin[0]
    for thought in (f"I could write {marker} here.", f"{marker}{{}} or {marker}", f"{marker}\nunknown_function "):
        answer = f"<think>{thought}</think>\n{call}"
        for parts in cuts(answer, every=9):
            reasoning, content, found = parse(parts, reasoning=REASONING["qwen3"], tools=fmt, offered=TOOL_LIST)
            assert (reasoning, content) == (thought, ""), parts
            assert [(function, json.loads(arguments)) for function, arguments in found] == calls


def test_reasoning_that_is_never_closed_keeps_what_only_looks_like_a_call():
    for parts in cuts("<think>I write <tool_call> and stop"):
        found = parse(parts, reasoning=REASONING["qwen3"], tools=TOOLS["hermes"], offered=TOOL_LIST)
        assert found == ("I write <tool_call> and stop", "", [])


def test_an_end_marker_behind_a_call_in_the_reasoning_is_left_out():
    text, calls = CASES["hermes"]
    for parts in cuts(f"<think>Look.\n{text}\n</think>\nSo.", every=5):
        reasoning, content, found = parse(parts, reasoning=REASONING["qwen3"], tools=TOOLS["hermes"], offered=TOOL_LIST)
        assert (reasoning, content) == ("Look.\n", "So.")
        assert [function for function, _ in found] == [function for function, _ in calls]


def test_a_call_ends_reasoning_as_soon_as_its_function_is_known():
    parser = AnswerParser(REASONING["qwen3"], TOOLS["hermes"], offered=TOOL_LIST, in_reasoning=True)
    reasoning, _, calls = joined(parser.push('Look.\n<tool_call>\n{"name": "now"'))
    assert (reasoning, calls) == ("Look.\n", [("now", "")])


def test_the_operator_s_strings_replace_a_format_s_or_make_one():
    known = choose_formats("qwen3", "none", None)
    changed = apply_strings(known, "<reason>", "Enough.</think>").reasoning
    assert changed is not None and (changed.start, changed.end) == (("<reason>", "<think>"), ("</think>",))
    assert changed.forced == "Enough.</think>"
    assert apply_strings(known, "", "") == known
    made = apply_strings(AnswerFormats(), "<a>", "</a>")
    assert made.reasoning is not None and (made.reasoning.start, made.reasoning.end) == (("<a>",), ("</a>",))
    with pytest.raises(ConfigError, match="give reasoning_end_str as well"):
        apply_strings(AnswerFormats(), "<a>", "")
    harmony = choose_formats("openai_gptoss", "none", None)
    assert apply_strings(harmony, "<a>", "</a>") == harmony


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("nemotron_v3", '<tool_call>\n{"name": "f"}'),
        ("kimi_k2", "<|tool_calls_section_begin|>call"),
        ("k2_horizon", "<ifm|tool_calls><ifm|tool_call>ping</ifm|tool_call>"),
        ("gemma4", "<|tool_call>call:f{}<tool_call|>"),
    ],
)
def test_a_call_ends_the_reasoning_of_an_answer_that_no_calls_are_looked_for_in(name, text):
    thought = "I look.\n\n" if "reasoning" in REASONING[name].own_space else "I look."
    for parts in cuts(f"{REASONING[name].start[0]}I look.\n\n{text}"):
        assert parse(parts, reasoning=REASONING[name]) == (thought, text, [])
    thought = REASONING[name].start[0] + "I could write <tool_call> here" + REASONING[name].end[0] + "So."
    for parts in cuts(thought):
        assert parse(parts, reasoning=REASONING[name]) == ("I could write <tool_call> here", "So.", [])


def soup(draw, name, tools):
    """A text of markers, whole and cut off, calls, words and white space."""
    fmt, calls = REASONING[name], TOOLS[tools]
    marks = [*fmt.start, *fmt.end, *fmt.again, *fmt.answer, *fmt.calls, *calls.begin, *calls.end, *calls.section]
    words = [
        "Why",
        " so",
        "\n",
        " ",
        "\n\n",
        "{",
        "[",
        '"',
        "<",
        "</",
        ">",
        "thought",
        "now",
        "get_weather",
        CASES[tools][0],
    ]
    parts = [draw.choice(fmt.start)] if draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 9)):
        chosen = draw.choice(marks if draw.random() < 0.5 else words)
        parts.append(chosen[: draw.randint(1, len(chosen))] if draw.random() < 0.15 else chosen)
    return "".join(parts)


def some_cuts(draw, text):
    yield list(text)
    for _ in range(6):
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 10)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_adds_up_to_the_whole_answer_for_any_two_formats(seed):
    draw = random.Random(seed)
    for name in REASONING:
        tools = draw.choice(list(CASES))
        text, inside = soup(draw, name, tools), draw.choice([None, None, True, False])
        formats = {"reasoning": REASONING[name], "tools": TOOLS[tools], "offered": TOOL_LIST, "in_reasoning": inside}
        whole = parse([text], **formats)
        for parts in some_cuts(draw, text):
            assert parse(parts, **formats) == whole, (name, tools, inside, parts)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_harmony_adds_up_to_the_whole_answer(seed):
    draw = random.Random(seed)
    words = [
        *MARKERS,
        *MARKERS,
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.now",
        " to=python",
        " ",
        "\n",
        "{}",
    ]
    for _ in range(60):
        text = "".join(draw.choice(words) for _ in range(draw.randint(1, 14)))
        whole = parse([text], is_harmony=True, offered=TOOL_LIST)
        for parts in some_cuts(draw, text):
            assert parse(parts, is_harmony=True, offered=TOOL_LIST) == whole, parts


def test_an_answer_that_must_not_reason_does_not_show_what_it_reasons():
    assert read("minicpmv", "a<think>b</think>c", OFF) == ("", "ac")
    assert read("minicpmv", "<think>b", OFF) == ("", "")
    assert read("minicpmv", "a </think>\nb", OFF) == (
        "",
        "a \nb",
    )  # words on either side of a stray marker are not joined


def test_an_answer_that_begins_with_the_marker_of_the_answer_has_no_reasoning():
    answer = "<|open|>response<|sep|>Hello<|close|>response<|sep|>"
    for parts in ([answer], list(answer)):
        assert parse(parts, reasoning=REASONING["kimi_k3"])[:2] == ("", "Hello")
    assert read("kimi_k3", "Hm<|close|>think<|sep|>" + answer) == ("Hm", "Hello")
