"""Chat templates render as Hugging Face renders them, refuse what they must, and cannot leave the sandbox."""

import jinja2
import pytest
from tests.tokenizers.templates import PARTS_ONLY, TEMPLATES, TURNS

from quire.errors import ConfigError, RequestError
from quire.tokenizers.chat_template import ChatTemplate
from quire.tokenizers.content_format import wants_parts

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "  Hello "}]
SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def test_messages_and_generation_prompt_are_printed():
    assert ChatTemplate(SIMPLE).render(CHAT, add_generation_prompt=True) == "[user]hi;[assistant]Hello;>"


def test_tojson_keeps_text_readable_and_indents():
    template = ChatTemplate("{{ tools[0] | tojson }}|{{ tools[0] | tojson(indent=2) }}")
    assert template.render([], tools=[{"n": "é<"}]) == '{"n": "é<"}|{\n  "n": "é<"\n}'


def test_raise_exception_refuses_the_conversation():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CHAT)
    assert caught.value.param == "messages"


def test_loop_controls_generation_tag_and_strftime_are_known():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source).render(CHAT) == "hi4"


def test_a_trimmed_last_message_stays_open_without_its_spaces():
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert ChatTemplate(source).render(CHAT, continue_final_message=True) == "[hi][Hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.__init__.__globals__ }}",
        "{{ dict.__call__.__func__ }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.sys }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    with pytest.raises(RequestError):
        ChatTemplate(source).render(CHAT)


def test_a_broken_template_is_a_config_error_with_its_line():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% for %}").render(CHAT)


@pytest.mark.parametrize("content", ["  Hello ", [{"type": "text", "text": "  Hello "}]])
def test_the_last_message_can_stay_open(content):
    source = "{% for m in messages %}[{{ m.content if m.content is string else m.content[0].text }}]<end>{% endfor %}"
    text = ChatTemplate(source).render(
        [*CHAT[:1], {"role": "assistant", "content": content}], continue_final_message=True
    )
    assert text == "[hi]<end>[  Hello "


def test_an_open_last_message_and_a_generation_prompt_exclude_one_another():
    with pytest.raises(RequestError) as caught:
        ChatTemplate(SIMPLE).render(CHAT, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


def test_a_named_template_is_chosen_by_name_or_by_tools():
    template = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"})
    assert template.render([]) == "d"
    assert template.render([], tools=[{}]) == "t"
    assert ChatTemplate.choose(template, "rag").render([]) == "r"
    assert ChatTemplate.choose(template, "{{ 1 + 1 }}").render([]) == "2"


def test_no_template_is_refused_with_a_way_out():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate.choose(None, None)


def test_text_is_handed_as_parts_to_templates_that_know_nothing_else():
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    template = ChatTemplate(PARTS_ONLY)
    assert template.render(CHAT) == template.render(parts) == "<user>hi<assistant>  Hello "
    assert template.render(CHAT, continue_final_message=True) == "<user>hi<assistant>  Hello "
    assert ChatTemplate(TURNS).render(CHAT) == ChatTemplate(TURNS).render(parts)
    macro = "{% macro say(it) %}{% for part in it %}{{ part.text }}{% endfor %}{% endmacro %}"
    assert ChatTemplate(macro + "{% for m in messages %}{{ say(m.content) }}{% endfor %}").render(CHAT) == "hi  Hello "


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_stays_text_where_templates_ask_or_print_it(name):
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    source = TEMPLATES[name].replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    assert not wants_parts(environment.parse(source))[0]


LOOP = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
BOTH = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content_format", "text", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "auto", "ab", "a\nb"),
        ("{% for m in messages %}" + LOOP + "{% endfor %}", "auto", "<ab>", "<a><b>"),
        (BOTH, "auto", "ab", "<a><b>"),
        (BOTH, "openai", "<ab>", "<a><b>"),
        (BOTH, "string", "ab", "a\nb"),
    ],
)
def test_contents_come_as_the_template_takes_them_or_as_is_asked(source, content_format, text, parts):
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, expected in (("ab", text), (two, parts)):
        messages = [{"role": "user", "content": content}]
        assert ChatTemplate(source).render(messages, content_format=content_format) == expected
