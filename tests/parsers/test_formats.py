"""Every format: what a model writes becomes reasoning, content and calls, wherever the text is cut."""

import json
import random

import pytest
from tests.parsers.writing import write

from quire.parsers.formats import REASONING, TOOLS
from quire.parsers.pieces import Piece
from quire.parsers.stream import AnswerParser, parse_answer

TOOL_LIST = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = {"city": 'Köln "Süd"', "days": 3, "tags": ["a", "b\\"]}
CALL = json.dumps({"name": "get_weather", "arguments": WEATHER}, ensure_ascii=False)
PARAMETERS = CALL.replace('"arguments"', '"parameters"')
NOW = '{"name": "now", "arguments": {}}'
ARGUMENTS = json.dumps(WEATHER, ensure_ascii=False)
LISTED = f"[{CALL}, {NOW}]"
PYTHON = """get_weather(city='Köln "Süd"', days=3, tags=["a", "b\\\\"])"""


def tagged(function: str, parameter: str, close: str = "</parameter>", end: str = "</function>", line: str = "") -> str:
    values = [("city", 'Köln "Süd"'), ("days", "3"), ("tags", json.dumps(WEATHER["tags"]))]
    return function + "".join(parameter.format(key) + f"{line}{value}{line}{close}\n" for key, value in values) + end


QWEN_CODER = tagged("<function=get_weather>\n", "<parameter={}>", line="\n")
STEP3 = tagged(
    '<steptml:invoke name="get_weather">', '<steptml:parameter name="{}">', "</steptml:parameter>", "</steptml:invoke>"
)
MINIMAX = tagged('<invoke name="get_weather">\n', '<parameter name="{}">', end="</invoke>")
GLM = "get_weather\n" + "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for key, value in (("city", 'Köln "Süd"'), ("days", "3"), ("tags", json.dumps(WEATHER["tags"])))
)

BOTH = [("get_weather", WEATHER), ("now", {})]
ONE = [("get_weather", WEATHER)]

CASES: dict[str, tuple[str, list[tuple[str, dict]]]] = {
    "hermes": (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", BOTH),
    "qwen3_json": (f"<tool_call>\n{CALL}\n</tool_call>", ONE),
    "ernie45": (f"\n<tool_call>\n{CALL}\n</tool_call>\n\n<tool_call>\n{NOW}\n</tool_call>\n", BOTH),
    "xlam": (LISTED, BOTH),
    "llama3_json": (f"<|python_tag|>{PARAMETERS}; {NOW}", BOTH),
    "llama4_json": (PARAMETERS, ONE),
    "granite": (f"<|tool_call|>{LISTED}", BOTH),
    "granite4": (f"<tool_call>{CALL}</tool_call>", ONE),
    "granite-20b-fc": (f"<function_call> {CALL}\n<function_call> {NOW}", BOTH),
    "internlm": (f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>", ONE),
    "jamba": (f"<tool_calls>[\n{CALL},\n{NOW}\n]</tool_calls>", BOTH),
    "hunyuan_a13b": (f"<tool_calls>{LISTED}</tool_calls>", BOTH),
    "phi4_mini_json": (f"functools{LISTED}", BOTH),
    "lfm2": (f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>", BOTH),
    "mistral": (f"[TOOL_CALLS]{LISTED}", BOTH),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        BOTH,
    ),
    "qwen3_coder": (
        f"<tool_call>\n{QWEN_CODER}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        BOTH,
    ),
    "qwen3_xml": (f"<tool_call>\n{QWEN_CODER}\n</tool_call>", ONE),
    "seed_oss": (f"<seed:tool_call>\n{QWEN_CODER}\n</seed:tool_call>", ONE),
    "glm45": (f"<tool_call>{GLM}</tool_call>\n<tool_call>now\n</tool_call>", BOTH),
    "minimax_m2": (f'<minimax:tool_call>\n{MINIMAX}\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', BOTH),
    "step3": (
        f"<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>{STEP3}<｜tool_call_end｜><｜tool_calls_end｜>",
        ONE,
    ),
    "pythonic": (f"[{PYTHON}, now()]", BOTH),
    "llama4_pythonic": (f"<|python_start|>[{PYTHON}]<|python_end|>", ONE),
    "olmo3": (f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>", BOTH),
}
for name, tools in TOOLS.items():
    written = (
        ONE if tools.between else BOTH
    )  # where calls stand in messages, the reasoning's format has what is between
    CASES.setdefault(name, (write(name, written), written))
OTHERS = [
    ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]now{{}}", BOTH),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", ONE),
    (
        "hermes",
        '<tool_call>{"arguments": {"days": 1}, "name": "get_weather"}</tool_call>',
        [("get_weather", {"days": 1})],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>{"id": [{"]": 1}], "name": "now"}</tool_call>', [("now", {})]),
    ("xlam", f"```json\n{LISTED}\n```", BOTH),
    ("pythonic", "[now()]", [("now", {})]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=note>None</parameter></function></tool_call>",
        [("get_weather", {"note": "None"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>\n1 < 2\n\n</parameter></function></tool_call>",
        [("f", {"x": "1 < 2\n"})],
    ),
]


def joined(pieces):
    """What a client puts together: (reasoning, content, calls with their arguments' text)."""
    reasoning = content = ""
    calls = []
    for piece in pieces:
        if piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "content":
            content += piece.text
        elif piece.kind == "call":
            assert piece.index == len(calls)
            calls.append([piece.text, ""])
        else:
            calls[piece.index][1] += piece.text
    return reasoning, content, [tuple(call) for call in calls]


def parse(parts, **formats):
    """As a stream does: most parts are passed on unread where they are plain."""
    parser, pieces = AnswerParser(**formats), []
    for number, part in enumerate(parts):
        kind = parser.pass_plain(part) if number % 4 else None
        pieces += parser.push(part) if kind is None else [Piece(kind, part)]
    return joined([*pieces, *parser.finish()])


def cuts(text, seed=0, every=1):
    """The text in two parts at every (so many) places, one by one, and in parts of random lengths."""
    yield from ([text[:at], text[at:]] for at in range(0, len(text) + 1, every))
    yield list(text)
    draw = random.Random(seed)
    for _ in range(20):
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_every_format_has_a_case():
    assert set(CASES) == set(TOOLS)


@pytest.mark.parametrize(("name", "text", "calls"), [*((n, *case) for n, case in CASES.items()), *OTHERS])
@pytest.mark.parametrize("before", ["", "Let me look. "])
def test_calls_are_read_wherever_the_text_is_cut(name, text, calls, before):
    fmt = TOOLS[name]
    if before and fmt.bare and not text.startswith(fmt.begin or ("\0",)):
        pytest.skip("a call without a marker begins the answer")
    whole = parse([before + text], tools=fmt, offered=TOOL_LIST)
    reasoning, content, found = whole
    assert reasoning == ""
    assert content == (before if fmt.keeps_space else before.strip())
    assert [(function, json.loads(arguments)) for function, arguments in found] == calls
    for parts in cuts(before + text, every=7 if before else 1):
        assert parse(parts, tools=fmt, offered=TOOL_LIST) == whole


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(
    "text",
    [
        "Just an answer, with <b>tags</b>, [lists] and {braces}.",
        '{"answer": {"x": [1, 2]}} ',
        "  two spaces, a line\n",
        "",
        "<tool_call>no call</tool_call",
        "[1, 2, 3] is a list",
        "if (a < b) { print([x for x in y]) }",
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(name, text):
    if name == "glm45" and "<tool_call>" in text:
        pytest.skip("any name may follow its marker")
    for parts in cuts(text):
        assert parse(parts, tools=TOOLS[name], offered=TOOL_LIST) == ("", text, [])


@pytest.mark.parametrize("name", TOOLS)
def test_a_call_that_is_cut_off_keeps_what_was_written(name):
    text, _ = CASES[name]
    for end in range(0, len(text), 3):
        whole = parse([text[:end]], tools=TOOLS[name], offered=TOOL_LIST)
        assert parse(list(text[:end]), tools=TOOLS[name], offered=TOOL_LIST) == whole
        for function, _ in whole[2]:
            assert function in ("get_weather", "now")


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_read_wherever_the_text_is_cut(name):
    fmt = REASONING[name]
    start, end = fmt.start[0], fmt.end[0]
    if fmt.is_content:
        pytest.skip("its reasoning is content")
    opened, closed = (*fmt.answer, "", "")[:2]
    for before, after, inside in (("\n", "\n\n", None), ("", "", True)):
        thought, said = f"{before}Why?  Because.\n", f"{after}{opened}So: it is.\nYes."
        expected = thought.lstrip() if "reasoning" not in fmt.own_space else thought
        expected = expected.rstrip() if "reasoning" not in fmt.own_space or fmt.ends_trimmed else expected
        content = said if "content" in fmt.own_space and not (fmt.header or opened) else "So: it is.\nYes."
        for parts in cuts(f"{'' if inside else start}{thought}{end}{said}{closed}"):
            assert parse(parts, reasoning=fmt, in_reasoning=inside) == (expected, content, [])


def test_plain_text_is_passed_on_unread():
    parser = AnswerParser(REASONING["deepseek_r1"], TOOLS["hermes"])
    assert parser.pass_plain("Why") is None  # before it is known whether it thinks
    parser.push("<think>Why")
    assert parser.pass_plain("? Because") == "reasoning"
    assert parser.pass_plain(" so ") is None and parser.pass_plain(" <b") is None and parser.pass_plain("") is None
    parser.push("</think>\n")
    assert parser.pass_plain("So") is None  # white space before it would belong to the format
    parser.push("So")
    assert parser.pass_plain(" it is") == "content"
    parser.push("<tool_call>")
    assert parser.pass_plain("text") is None
    keeps_space = AnswerParser(REASONING["qwen3"])
    keeps_space.push("<think>\n")
    assert keeps_space.pass_plain(" so ") == "reasoning"
    harmony = AnswerParser(is_harmony=True)
    harmony.push("<|channel|>final<|message|>An")
    assert harmony.pass_plain(" answer") == "content"


def test_an_answer_without_reasoning_is_content():
    assert parse(["No ", "thought."], reasoning=REASONING["qwen3"], in_reasoning=False) == ("", "No thought.", [])
    assert parse(["No thought."], reasoning=REASONING["deepseek_r1"], in_reasoning=False) == ("", "No thought.", [])
    assert parse(["All thought"], reasoning=REASONING["deepseek_r1"]) == ("All thought", "", [])


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45"])
def test_reasoning_and_calls_together(tools):
    text, calls = CASES[tools]
    answer = f"<think>\n<tool_call> is what I write.\n</think>\n\nOK.\n\n{text}\nDone."
    for parts in cuts(answer):
        reasoning, content, found = parse(parts, reasoning=REASONING["qwen3"], tools=TOOLS[tools], offered=TOOL_LIST)
        assert reasoning == "\n<tool_call> is what I write.\n"
        assert content == "OK.\n\n\nDone."
        assert [(function, json.loads(arguments)) for function, arguments in found] == calls


HARMONY = (
    "<|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look."
    f"<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)


def test_harmony_wherever_the_text_is_cut():
    for parts in cuts(HARMONY):
        reasoning, content, calls = parse(parts, is_harmony=True)
        assert (reasoning, content) == ("They want the weather.", "I will look.")
        assert [(function, json.loads(arguments)) for function, arguments in calls] == ONE
    final = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    for parts in cuts(final):
        assert parse(parts, is_harmony=True) == ("Easy.", "Four.", [])


HARMONY_CASES = [
    # Messages of one kind stand on lines of their own.
    (
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>42.<|end|>",
        ("", "Let me look.\n42.", []),
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|> b<|end|>",
        ("a\nb", "", []),
    ),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|> <|end|>", ("a", "", [])),
    # Recipients of calls: with and without their prefix, dotted, on either channel and either side of it.
    ('<|channel|>commentary to=now<|constrain|>json<|message|>{"a": 1}<|call|>', ("", "", [("now", '{"a": 1}')])),
    ('<|channel|>analysis to=functions.now<|message|>{"a": 1}<|call|>', ("", "", [("now", '{"a": 1}')])),
    ("<|start|>assistant to=math.sum<|channel|>commentary<|message|>{}<|end|>", ("", "", [("math.sum", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|>no JSON<|call|>", ("", "", [("now", "no JSON")])),
    (
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        ("", "", [("now", "{}")] * 2),
    ),
    # Recipients that are no function.
    (
        "<|channel|>commentary to=assistant<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>y",
        ("", "y", []),
    ),
    ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", ("", "", [])),
    # Answers that are cut off, and headers without their end.
    ("<|channel|>analysis<|message|>I thi", ("I thi", "", [])),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>fin", ("a", "", [])),
    ("<|channel|>commentary to=functions.now <|constrain|>json", ("", "", [])),
    (
        '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final {"answer": "hi"}<|return|>',
        ("a", '{"answer": "hi"}', []),
    ),
    ("no message at all", ("", "no message at all", [])),
]


@pytest.mark.parametrize(("text", "found"), HARMONY_CASES)
def test_messages_of_harmony_wherever_the_text_is_cut(text, found):
    for parts in cuts(text):
        assert parse(parts, is_harmony=True) == found


def test_a_function_that_is_called_as_a_built_in_tool_is_called():
    python = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
    text = "<|channel|>commentary to=python<|message|>{}<|call|>"
    assert parse([text], is_harmony=True, offered=python) == ("", "", [("python", "{}")])
    assert parse([text], is_harmony=True, offered=TOOL_LIST) == ("", "", [])


def test_a_whole_answer_at_once():
    text, calls = CASES["hermes"]
    answer = parse_answer("Look:\n" + text, tools=TOOLS["hermes"], offered=TOOL_LIST)
    assert answer.content == "Look:"
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls


def test_nesting_beyond_any_depth_is_no_danger():
    for name in TOOLS:
        deep = "[" * (100_000 if name in ("hermes", "pythonic") else 3_000)  # Python's own stack ends at 1,000
        begin = (TOOLS[name].begin or ("",))[0]
        parse([begin + '{"name": "now", "arguments": ' + deep], tools=TOOLS[name], offered=TOOL_LIST)
        parse([begin + "[now(a=" + deep], tools=TOOLS[name], offered=TOOL_LIST)


LOOKUP = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "limit": {"type": "integer"},
                    "wait": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    }
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # a call without its outer marker, and a parameter without its end
        (
            "qwen3_coder",
            "Well.\n<function=lookup>\n<parameter=city>\nKöln\n</parameter>\n</function>",
            "Well.",
            [{"city": "Köln"}],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=lookup>\n<parameter=city>\nKöln\n<parameter=limit>\n3\n</parameter>\n</function>"
            "\n</tool_call>",
            "",
            [{"city": "Köln", "limit": 3}],
        ),
        ("seed_oss", "<function=lookup><parameter=limit>007</function>", "", [{"limit": 7}]),
        # line breaks of a value are the model's where tags have none of their own
        (
            "minimax_m2",
            '<invoke name="lookup"><parameter name="city">\nKöln\n</parameter></invoke>',
            "",
            [{"city": "\nKöln\n"}],
        ),
        (
            "glm45",
            "<tool_call>lookup\n<arg_key>city</arg_key>\n<arg_value>\nKöln\n</arg_value>\n</tool_call>",
            "",
            [{"city": "\nKöln\n"}],
        ),
        # a call that is broken does not swallow the next
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>{"city": "Kö<|tool_call_end|>'
            '<|tool_call_begin|>functions.lookup:1<|tool_call_argument_begin|>{"limit": 2}<|tool_call_end|>',
            "",
            ['{"city": "Kö', {"limit": 2}],
        ),
        (
            "hermes",
            '<tool_call>{"name": "lookup", "arguments": {"city": </tool_call>\n'
            '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>',
            "",
            ['{"city": ', {}],
        ),
        (
            "hermes",
            '<tool_call>{"name": "lookup", "arguments": {"city": "a </tool_call> b"}}</tool_call>',
            "",
            [{"city": "a </tool_call> b"}],
        ),
        (
            "gemma4",
            '<|tool_call>call:no braces<tool_call|><|tool_call>call:lookup{city:<|"|>Köln<|"|>}<tool_call|>',
            "<|tool_call>call:no braces<tool_call|>",
            [{"city": "Köln"}],
        ),
        # text before a call that has no marker; JSON that is none
        ("llama3_json", 'Here: {"name": "lookup", "parameters": {"limit": 2}} Done.', "Here:  Done.", [{"limit": 2}]),
        (
            "llama3_json",
            '{"name": "lookup", "parameters": {no json}}',
            '{"name": "lookup", "parameters": {no json}}',
            [],
        ),
        (
            "llama3_json",
            'So {"name": "other", "parameters": {}} is none.',
            'So {"name": "other", "parameters": {}} is none.',
            [],
        ),
        ("xlam", 'Look: [{"name": "lookup", "arguments": {}}]', "Look:", [{}]),
        # Python's notation as models write it
        (
            "lfm2",
            "<|tool_call_start|>[lookup(city='it's\nme', limit=05)]<|tool_call_end|>",
            "",
            [{"city": "it's\nme", "limit": 5}],
        ),
        ("pythonic", "[lookup(wait={'a', 'b'}, from='x')]", "", [{"wait": ["a", "b"], "from": "x"}]),
        # what the tag says, and what the schema says
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="lookup"><｜DSML｜parameter name="limit" string="true">42</｜DSML｜parameter>'
            '<｜DSML｜parameter name="more">[1]</｜DSML｜parameter></｜DSML｜invoke>',
            "",
            [{"limit": 42, "more": [1]}],
        ),
        (
            "deepseek_v4",
            '<｜DSML｜invoke name="lookup"><｜DSML｜parameter name="arguments" string="false">{"city": "Köln"}'
            "</｜DSML｜parameter></｜DSML｜invoke>",
            "",
            [{"city": "Köln"}],
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<invoke name="lookup">]<]minimax[>[<wait>]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[<a>2'
            "]<]minimax[>[</a>]<]minimax[>[</wait>]<]minimax[>[</invoke>",
            "",
            [{"wait": {"a": ["1", "2"]}}],
        ),
        (
            "minicpm5",
            '<functionname="lookup"><param name="city"><![CDATA[ a < b ]]></param></function>',
            "",
            [{"city": " a < b "}],
        ),
        ("step3", '<｜tool_call_begin｜><steptml:invoke name="lookup"></steptml:invoke><｜tool_call_end｜>', "", [{}]),
    ],
)
def test_calls_as_models_really_write_them(name, text, content, calls):
    whole = parse([text], tools=TOOLS[name], offered=LOOKUP)
    assert whole[1] == content
    written = [
        arguments if isinstance(call, str) else json.loads(arguments)
        for call, (_, arguments) in zip(calls, whole[2], strict=True)
    ]
    assert written == calls
    for parts in cuts(text):
        assert parse(parts, tools=TOOLS[name], offered=LOOKUP) == whole


def test_text_between_calls_keeps_its_white_space():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for text, content in (
        (f"First {call}\n{call}\nthen {call}", "First \nthen"),
        (f"{call} then {call} last", "then  last"),
        (f"A {call}{call}", "A"),
    ):
        for parts in cuts(text):
            assert parse(parts, tools=TOOLS["hermes"], offered=TOOL_LIST)[1] == content


def test_the_id_that_a_model_writes_is_kept():
    text = '<|START_ACTION|>[{"tool_call_id": "7", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'
    assert parse_answer(text, tools=TOOLS["cohere_command4"], offered=TOOL_LIST).calls[0].id == "7"
