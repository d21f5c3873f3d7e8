"""Answers as models really write them, whole and wherever their text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.parsers.test_formats import CASES, TOOL_LIST, cuts, parse

from quire.errors import RequestError
from quire.parsers.formats import REASONING, TOOLS
from quire.parsers.stream import AnswerParser

LIGHT = {
    "type": "function",
    "function": {
        "name": "light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "level": {"type": "integer"}, "on": {"type": "boolean"}},
            "required": ["room"],
        },
    },
}
OFF = {"type": "function", "function": {"name": "off", "parameters": {"type": "object", "properties": {}}}}
OFFERED = [LIGHT, OFF]


def read(text, tools, reasoning=None, offered=OFFERED, **options):
    """(reasoning, content, calls with their arguments read) of an answer; the same wherever it is cut."""
    formats = {"tools": tools, "reasoning": reasoning, "offered": offered, **options}
    whole = parse([text], **formats)
    for parts in cuts(text, every=3):
        assert parse(parts, **formats) == whole, parts
    return whole[0], whole[1], [(name, json.loads(arguments)) for name, arguments in whole[2]]


# --- calls that are handed on whole ---

K2 = TOOLS["k2_horizon"]


def k2_group(*calls):
    written = "\n".join(f"<ifm|tool_call>{call}</ifm|tool_call>" for call in calls)
    return f"<ifm|tool_calls>{written}</ifm|tool_calls>"


def k2_parameters(*pairs, kind=""):
    tag = f"<ifm|arg_type>{kind}</ifm|arg_type>" if kind else ""
    return "".join(f"<ifm|arg_key>{k}</ifm|arg_key>{tag}<ifm|arg_value>{v}</ifm|arg_value>" for k, v in pairs)


K2_CALLS = {
    "xml": "light" + k2_parameters(("room", "attic"), ("level", "3")),
    "json": '{"name": "light", "arguments": {"room": "attic", "level": "3"}}',
    "xml_typed": "light" + k2_parameters(("room", "attic"), ("level", "3"), kind="string"),
}


@pytest.mark.parametrize("asked", [None, "xml", "json", "xml_typed"])
@pytest.mark.parametrize("written", K2_CALLS)
def test_a_template_s_variable_says_how_calls_are_written(asked, written):
    tools = K2.of_request({} if asked is None else {"tool_call_format": asked})
    text = "So. " + k2_group(K2_CALLS[written], K2_CALLS[written])
    found = read(text, tools)
    if written == (asked or "xml"):
        assert found == ("", "So.", [("light", {"room": "attic", "level": 3})] * 2)
    else:
        assert found == ("", text, [])


@pytest.mark.parametrize("value", ["yaml", "", None, 1])
def test_a_way_of_writing_that_a_format_does_not_know_is_refused(value):
    with pytest.raises(RequestError, match="allowed: 'xml', 'json', 'xml_typed'"):
        K2.of_request({"tool_call_format": value})


@pytest.mark.parametrize(
    "text",
    [
        k2_group("off").removesuffix("</ifm|tool_calls>"),
        k2_group("off").removesuffix("</ifm|tool_call></ifm|tool_calls>"),
        k2_group("junk"),
        k2_group("off", "unknown"),
        k2_group("off").replace("</ifm|tool_calls>", "more</ifm|tool_calls>"),
    ],
)
def test_calls_of_a_group_that_is_not_whole_are_content(text):
    assert read("So. " + text, K2) == ("", "So. " + text, [])


def minicpm(*pairs, name="light"):
    return f'<function name="{name}">{"".join(f"<param{key}>{value}</param>" for key, value in pairs)}</function>'


@pytest.mark.parametrize(
    ("pairs", "arguments"),
    [
        ([(' name="room"', "attic"), (' name="colour"', "red")], {"room": "attic"}),
        ([(' name="level"', "2"), (' name="room"', "attic")], {"level": 2, "room": "attic"}),
        ([(' name="arguments"', '{"room": "attic", "level": 2}')], {"room": "attic", "level": 2}),
        ([(' name="colour"', "red")], None),
        ([(' name="room"', "attic"), (' name="room"', "hall")], None),
        ([("", "attic"), (' name="room"', "hall")], None),
        ([(' name="properties"', '{"colour": "red"}')], None),
    ],
)
def test_a_call_that_does_not_fit_its_function_is_content(pairs, arguments):
    text = minicpm(*pairs)
    found = read(text, TOOLS["minicpm5"])
    assert found == (("", "", [("light", arguments)]) if arguments is not None else ("", text, []))


def test_a_call_of_a_whole_format_comes_when_its_end_has_come():
    text = minicpm((' name="room"', "attic"))
    parser = AnswerParser(tools=TOOLS["minicpm5"], offered=OFFERED)
    assert parser.push(text[:-1]) == []
    assert [piece.kind for piece in parser.push(text[-1])] == ["call", "arguments"]
    for end in range(1, len(text)):
        assert read(text[:end], TOOLS["minicpm5"]) == ("", text[:end], [])


@given(level=st.integers(-(2**70), 2**70), room=st.text(st.characters(codec="utf-8", exclude_characters="<>&\x00")))
def test_values_of_a_whole_call_are_kept(level, room):
    call = json.dumps({"name": "light", "arguments": {"room": room, "level": level}}, ensure_ascii=False)
    tools = K2.of_request({"tool_call_format": "json"})
    (_, arguments), *_ = parse([k2_group(call)], tools=tools, offered=OFFERED)[2]
    assert json.loads(arguments) == {"room": room, "level": level}


# --- what stands beside calls ---

ENDING = [name for name in TOOLS if TOOLS[name].ends_turn]


@pytest.mark.parametrize("name", ENDING)
def test_text_behind_the_calls_of_some_formats_is_left_out(name):
    text, calls = CASES[name]
    assert read(f"So.{text}\nDone. {text} More.", TOOLS[name], offered=TOOL_LIST) == ("", "So.", [*calls, *calls])


@pytest.mark.parametrize(("name", "marker"), [("mistral", "[TOOL_CALLS]"), ("hermes", "<tool_call>")])
def test_a_marker_that_is_written_twice_is_one(name, marker):
    text, calls = CASES[name]
    for between in ("", " ", "\n"):
        assert read(marker + between + text, TOOLS[name], offered=TOOL_LIST) == ("", "", calls)
    assert read(f"{marker}{marker} no call", TOOLS["hermes"]) == ("", f"{marker}{marker} no call", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('shell[TOOL_CALLS]{"command": "ls"}', "shell", [("", {"command": "ls"})]),
        ('[TOOL_CALLS][ARGS]{"a": {"b": 1}}[TOOL_CALLS]off[ARGS]{}', "", [("", {"a": {"b": 1}}), ("off", {})]),
        ('[TOOL_CALLS] [{"arguments": {"a": 1}}]', "", [("", {"a": 1})]),
        ('[TOOL_CALLS] {"name": "off", "arguments": {}}', "", [("off", {})]),
        ("[TOOL_CALLS] not a call", "not a call", []),
        ("[TOOL_CALLS] 42", "42", []),
        ('[TOOL_CALLS] ["off"]', '["off"]', []),
        ("[TOOL_CALLS]{not JSON", "{not JSON", []),
    ],
)
def test_mistral_calls_without_a_name_and_markers_without_a_call(text, content, calls):
    assert read(text, TOOLS["mistral"]) == ("", content, calls)


def test_dots_leaves_out_markers_that_mark_no_call():
    assert read("a <dots_function_call>b</dots_function_call>", TOOLS["dots"]) == ("", "a b", [])
    assert read("a </dots_function_call>b", TOOLS["dots"]) == ("", "a b", [])


@pytest.mark.parametrize("name", [name for name in TOOLS if TOOLS[name].hides])
def test_calls_that_a_request_does_not_want_are_left_out_by_some_formats(name):
    text, calls = CASES[name]
    formats = {"reasoning": REASONING.get(name) if TOOLS[name].between else None, "offered": TOOL_LIST}
    _, content, found = read(text, TOOLS[name], **formats)
    assert found == calls
    parser = AnswerParser(tools=TOOLS[name], hides_calls=True)
    parser.push(text)
    assert parser.num_calls == 0
    assert read(f"So.{text}", TOOLS[name], **formats, hides_calls=True)[2] == []
    assert read(text, TOOLS[name], **formats, hides_calls=True) == ("", content, [])


@pytest.mark.parametrize("name", [name for name in TOOLS if TOOLS[name].drops_cut])
def test_a_marker_that_is_cut_off_is_left_out_by_some_formats(name):
    text, _ = CASES[name]
    for end in range(3, text.index("get_weather")):
        whole = parse(["So.", text[:end]], tools=TOOLS[name], offered=TOOL_LIST)
        assert (whole[1].removesuffix("|").removesuffix("<"), whole[2]) == ("So.", [])
        assert parse(list(f"So.{text[:end]}"), tools=TOOLS[name], offered=TOOL_LIST) == whole
    assert parse(["So <"], tools=TOOLS[name]) == ("", "So <", [])


def test_plamo3_calls_without_their_first_marker_are_read():
    text, calls = CASES["plamo3"]
    text = text.replace("<|plamo:begin_tool_request:plamo|>", "")
    assert read(text, TOOLS["plamo3"], offered=TOOL_LIST) == ("", "", calls)


# --- calls and reasoning ---

INVOKE = '<｜DSML｜invoke name="off">\n</｜DSML｜invoke>'


def test_a_call_that_is_only_drafted_stays_reasoning_where_calls_have_a_section():
    reasoning, tools = REASONING["deepseek_v4"], TOOLS["deepseek_v4"]
    assert read(f"<think>Maybe {INVOKE} or", tools, reasoning) == (f"Maybe {INVOKE} or", "", [])
    for opened in ("tool_calls", "toolcalls", "tool"):
        text = f"<think>I look.\n<｜DSML｜{opened}>\n{INVOKE}\n</｜DSML｜tool_calls>"
        assert read(text, tools, reasoning) == ("I look.", "", [("off", {})])
        assert read(text, tools, reasoning, offered=[LIGHT]) == ("I look.", "", [("off", {})]), "an unknown function"


def test_white_space_alone_before_a_call_is_no_content_though_white_space_is_kept():
    reasoning, tools = REASONING["step3p5"], TOOLS["step3p5"]
    call, calls = CASES["step3p5"]
    assert read(f"\nWhy? \n</think>\n\n{call}", tools, reasoning, TOOL_LIST) == ("\nWhy?", "", calls)
    assert read(f"Why?</think>\nSo. \n{call}", tools, reasoning, TOOL_LIST) == ("Why?", "\nSo. \n", calls)
    assert read("Why?</think>\n", tools, reasoning) == ("Why?", "\n", [])


MUSE_CALL = (
    'to=home.off<|message|><atem:function_calls>\n<atem:invoke name="home.off">\n</atem:invoke>\n</atem:function_calls>'
)


def test_muse_calls_functions_of_any_name_between_its_messages():
    text = f"to=self<|message|>Why?<|eom|><|start|>assistant to=commentary<|message|>I look.<|eom|><|start|>assistant {MUSE_CALL}"
    expected = ("Why?", "I look.", [("home.off", {})])
    assert read(text, TOOLS["muse"], REASONING["muse"]) == expected
    assert (
        read(text.replace("<|eom|><|start|>assistant to=home", "to=home"), TOOLS["muse"], REASONING["muse"]) == expected
    )


def test_a_muse_message_to_a_function_is_content_where_no_calls_are_looked_for():
    text = f"to=self<|message|>Why?<|eom|><|start|>assistant {MUSE_CALL}<|eot|>"
    assert read(text, None, REASONING["muse"]) == ("Why?", MUSE_CALL, [])
    assert read(text, None, REASONING["muse_glimmer"]) == ("Why?", MUSE_CALL, [])


def test_a_name_that_minimax_m2_is_not_offered_is_content():
    text = '<minimax:tool_call><invoke name="nothing"></invoke><invoke name="off"></invoke></minimax:tool_call>'
    assert read(text, TOOLS["minimax_m2"]) == ("", '<invoke name="nothing"></invoke>', [("off", {})])


def test_a_whole_number_is_written_as_one():
    text = '<|tool_call>call:light{room:<|"|>attic<|"|>,level:5.0}<tool_call|>'
    assert read(text, TOOLS["gemma4"]) == ("", "", [("light", {"room": "attic", "level": 5})])
    assert '"level": 5}' in parse([text], tools=TOOLS["gemma4"], offered=OFFERED)[2][0][1]
