"""The playground in a real browser, on the demo model: what is typed, what is answered, what can be done with it."""

import json
import shutil
import subprocess
import sys

import jsonschema
import pytest

from .conftest import answer, change, refusal, say, until

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COUNT = "Count from 1 to 25"
COUNTED = ", ".join(map(str, range(1, 26)))


def test_an_answer_appears_piece_by_piece(page):
    page.evaluate(
        """() => {
          window.seen = [];
          new MutationObserver(() => {
            const text = document.querySelector(".turn.assistant .prose")?.textContent;
            if (text && text !== window.seen.at(-1)) window.seen.push(text);
          }).observe(document.body, { childList: true, subtree: true, characterData: true });
        }"""
    )
    say(page, COUNT)
    assert answer(page).locator(".prose").inner_text() == COUNTED
    seen = page.evaluate("window.seen")
    assert len(seen) > 2
    assert all(COUNTED.startswith(text) for text in seen) and seen[-1] == COUNTED
    assert "tokens" in answer(page).locator(".stats").inner_text()


def test_stop_ends_the_answer_here_and_in_the_engine(page, demo):
    change(page, "Max tokens", "1900")
    page.get_by_label("Go on after the end token").check()
    say(page, COUNT)
    until(page, "document.querySelector('.turn.assistant .prose')?.textContent.startsWith('1, 2')")
    page.get_by_role("button", name="Stop").click()
    turn = answer(page)
    assert "stopped" in turn.locator(".stats").inner_text()
    assert page.get_by_role("button", name="Send", exact=True).is_visible()
    while demo.client.get("/load").json()["server_load"]:
        page.wait_for_timeout(50)
    assert turn.locator(".prose").inner_text().startswith("1, 2")


def test_an_answer_follows_a_json_schema(page):
    change(page, "The answer is", "json_schema")
    change(page, "JSON schema", json.dumps(SCHEMA))
    say(page, "Make JSON with name Bob and age 7")
    value = json.loads(answer(page).locator("figure.code code").inner_text())
    jsonschema.validate(value, SCHEMA)
    assert value["name"] == "Bob"


def test_a_schema_that_is_no_json_is_refused_where_it_stands(page):
    change(page, "The answer is", "json_schema")
    change(page, "JSON schema", '{"type": }')
    say(page, "Hello")
    editor = page.get_by_label("JSON schema", exact=True)
    assert editor.get_attribute("aria-invalid") == "true"
    assert editor.evaluate("node => node === document.activeElement")
    assert "Not valid JSON" in page.locator(".verdict .error-text").inner_text()
    assert page.input_value("#composer") == "Hello" and page.locator(".turn").count() == 0


def test_a_tool_call_is_shown_and_its_result_goes_back(page):
    change(page, "Tools, as a JSON list", json.dumps([TOOL]))
    say(page, "What is the weather in Paris?")
    call = answer(page).locator(".call")
    assert call.locator(".call-title").inner_text() == "calls get_weather"
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Paris"}
    call.get_by_label("Result of get_weather").fill("sunny, 21 degrees")
    call.get_by_role("button", name="Send result").click()
    assert "sunny" in answer(page, 2).locator(".prose").inner_text()
    assert call.locator("pre").nth(1).inner_text() == "sunny, 21 degrees"
    assert page.locator(".call textarea").count() == 0


def test_a_tool_can_be_called_always(page):
    change(page, "Tools, as a JSON list", json.dumps([TOOL]))
    change(page, "Tool choice", "=get_weather")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "What is the weather in Paris?")
    assert sent.value.post_data_json["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert json.loads(answer(page).locator(".call pre").inner_text()).keys() == {"city"}


def test_reasoning_stands_apart_from_the_answer(page):
    change(page, "Thinking", "on")
    change(page, "Temperature", "0")  # a drawn answer leaves its thoughts out now and then
    say(page, "What is 17 + 25?")
    turn = answer(page)
    assert turn.locator(".prose").inner_text() == "17 + 25 = 42"
    assert turn.locator(".reasoning summary").inner_text().startswith("Thought")
    assert not turn.locator(".reasoning-text").is_visible()
    turn.locator(".reasoning summary").click()
    assert "42" in turn.locator(".reasoning-text").inner_text()


def test_the_heat_map_shows_every_token_and_its_alternatives(page):
    page.get_by_text("Token probabilities").click()
    page.get_by_label("Ask for them").check()
    change(page, "Alternatives for each token", "4")
    say(page, "What is 17 + 25?")
    turn = answer(page)
    turn.get_by_role("radio", name="Heat map").click()
    tokens = turn.locator(".token")
    assert "".join(tokens.all_inner_texts()) == "17 + 25 = 42<|im_end|>"
    tokens.first.focus()
    details = page.locator(".alternatives")
    assert details.locator("li").count() == 4 and details.locator(".chosen code").inner_text() == "1"
    page.keyboard.press("ArrowRight")
    assert details.locator(".chosen code").inner_text() == "7"
    assert tokens.nth(1).get_attribute("aria-describedby") == details.get_attribute("id")
    page.keyboard.press("Escape")
    assert not details.is_visible()
    tokens.nth(2).hover()
    assert details.locator(".chosen code").inner_text() == "·+"
    assert "perplexity 1.0" in turn.locator(".legend").inner_text()
    turn.get_by_role("radio", name="Text").click()
    assert turn.locator(".prose").inner_text() == "17 + 25 = 42"


def test_a_completion_goes_on_with_its_prompt(page):
    page.get_by_role("radio", name="Completion").click()
    prompt = "<|im_start|>user\nCount from 1 to 12<|im_end|>\n<|im_start|>assistant\n"
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_text("Token probabilities").click()
    page.get_by_label("Ask for them").check()
    change(page, "Max tokens", "64")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    page.wait_for_selector(".completion .stats:not(:empty)")
    assert page.locator(".written").inner_text() == ", ".join(map(str, range(1, 13)))
    page.get_by_role("radio", name="Heat map").click()
    assert page.locator(".completion .token").count() > 20
    page.get_by_role("button", name="Make it the prompt").click()
    assert page.get_by_label("Prompt", exact=True).input_value() == prompt + ", ".join(map(str, range(1, 13)))


TEXT = "Hello wörld, this is Quire.\n  Two → 😀 12345"


def test_the_token_view_shows_what_a_text_is_cut_into(page, demo):
    page.get_by_role("radio", name="Tokens").click()
    page.get_by_label("Text to tokenize").fill(TEXT)
    expected = demo.client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    until(page, "count => document.querySelectorAll('.chip').length === count", expected["count"])
    assert page.locator(".chip small").all_text_contents() == [str(token) for token in expected["tokens"]]
    shown = [text.removesuffix("\n") for text in page.locator(".chip").all_inner_texts()]
    assert shown[0] == "Hello" and "·this" in shown and "⟨C3⟩" in shown
    assert f"{expected['count']} tokens" in page.locator(".token-count").inner_text()
    page.get_by_role("radio", name="Chat").click()
    say(page, "Hello")
    answer(page)
    page.get_by_role("radio", name="Tokens").click()
    page.get_by_role("radio", name="The conversation").click()
    until(page, "document.querySelector('.chip')?.innerText.startsWith('<|im_start|>')")


def test_the_system_prompt_and_sampling_go_into_the_request(page):
    change(page, "System prompt", "You are calm.")
    change(page, "Temperature", "0")
    change(page, "Seed", "7")
    change(page, "Stop texts", "13\n\\n")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, COUNT)
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "You are calm."}
    assert (body["temperature"], body["seed"], body["stop"]) == (0, 7, ["13", "\n"])
    assert answer(page).locator(".prose").inner_text().endswith("12,")


@pytest.mark.parametrize("language", ["curl", "Python"])
def test_a_request_as_code_gives_the_same_answer(page, language):
    if language == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl is installed")
    change(page, "Temperature", "0")
    change(page, "Thinking", "off")
    page.fill("#composer", "What's 17 + 25?")
    page.get_by_role("button", name="Code").click()
    page.get_by_role("radio", name=language).click()
    page.get_by_role("dialog").get_by_role("button", name="Copy").click()
    code = page.evaluate("navigator.clipboard.readText()")
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    if language == "curl":
        chunks = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    else:
        said = done.stdout
    assert said == "17 + 25 = 42"


def test_what_was_said_can_be_edited_and_answers_asked_again(page):
    change(page, "Temperature", "0")
    say(page, "What is 17 + 25?")
    answer(page)
    say(page, "Hello")
    answer(page, 2)
    page.locator(".turn.user").first.hover()
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit what you said").fill("What is 20 + 3?")
    page.get_by_role("button", name="Ask again").click()
    until(page, "document.querySelectorAll('.turn').length === 2")
    assert answer(page).locator(".prose").inner_text() == "20 + 3 = 23"
    with page.expect_request("**/v1/chat/completions") as sent:
        answer(page).get_by_role("button", name="Retry").click()
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user"]
    assert answer(page).locator(".prose").inner_text() == "20 + 3 = 23"


def test_a_conversation_and_its_settings_survive_a_reload(page):
    change(page, "Temperature", "0")
    say(page, "What is 17 + 25?")
    answer(page)
    page.reload()
    assert answer(page).locator(".prose").inner_text() == "17 + 25 = 42"
    assert page.get_by_label("Temperature").input_value() == "0"
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0 and page.get_by_text("What should the model do?").is_visible()


def test_a_refusal_is_told_where_the_answer_would_be(open_page):
    page = open_page(expect_errors=True)
    change(page, "Max tokens", "1000000")
    say(page, "Hello")
    assert "max_tokens" in refusal(page)
    assert page.locator('[data-setting="max_tokens"]').get_attribute("aria-invalid") == "true"
    change(page, "Max tokens", "")
    page.locator(".turn.assistant").get_by_role("button", name="Retry").click()
    assert "help" in answer(page).locator(".prose").inner_text()
