"""What a reader keeps and gives: conversations in the browser, files, pictures, and settings of one message."""

import base64
import io
import json

import pytest
from tests.oracles.tiny_vision import make_tiny_vision

from .conftest import answer, change, say, until

ASKED, ANSWERED = "What is 17 + 25?", "17 + 25 = 42"


def stored(page) -> list[dict]:
    keys = "Object.keys(localStorage).filter((key) => key.startsWith('quire.chat.'))"
    return [json.loads(text) for text in page.evaluate(f"{keys}.map((key) => localStorage.getItem(key))")]


def attach(page, name: str, content: bytes, kind: str = "text/plain") -> None:
    page.locator("input[type=file]").set_input_files({"name": name, "mimeType": kind, "buffer": content})


def test_conversations_are_kept_opened_again_exported_and_deleted(page):
    say(page, ASKED)
    answer(page)
    page.get_by_role("button", name="New chat").click()
    say(page, "Count from 1 to 5")
    answer(page)
    page.get_by_role("button", name="History").click()
    dialog = page.get_by_role("dialog")
    assert dialog.locator(".kept-title strong").all_inner_texts() == ["Count from 1 to 5", ASKED]
    with page.expect_download() as saved:
        dialog.get_by_role("button", name=f"Save as text “{ASKED}”").click()
    text = saved.value.path().read_text("utf-8")
    assert text == f"# {ASKED}\n\n## You\n\n{ASKED}\n\n## Answer\n\n{ANSWERED}\n"
    with page.expect_download() as saved:
        dialog.get_by_role("button", name=f"Save as JSON “{ASKED}”").click()
    assert [turn["role"] for turn in json.loads(saved.value.path().read_text("utf-8"))["messages"]] == [
        "user",
        "assistant",
    ]
    dialog.locator(".kept-title").nth(1).click()
    assert answer(page).locator(".prose").inner_text() == ANSWERED
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name=f"Delete “{ASKED}”").click()
    assert [one["title"] for one in stored(page)] == ["Count from 1 to 5"]
    page.on("dialog", lambda asked: asked.accept())
    page.get_by_role("button", name="Delete all").click()
    assert page.get_by_text("None yet.").is_visible() and stored(page) == []
    page.keyboard.press("Escape")
    assert page.locator(".turn").count() == 0


def test_the_oldest_conversation_makes_room_where_the_browser_is_full(open_page):
    page = open_page(expect_errors=True)  # the model cannot read that much
    page.evaluate(
        """() => { for (let at = 0; at < 4; at += 1) localStorage.setItem(`quire.chat.old${at}`,
          JSON.stringify({ id: `old${at}`, title: "old", at, messages: [{ role: "user", content: "x".repeat(1.2e6) }] })); }"""
    )
    attach(page, "long.txt", b"page " * 100_000)
    say(page, ASKED)
    page.locator(".turn.assistant").wait_for()
    until(page, "Object.keys(localStorage).some((key) => key.startsWith('quire.chat.') && !key.includes('old'))")
    assert "old3" in {one["id"] for one in stored(page)} and "old0" not in {one["id"] for one in stored(page)}


def test_a_text_file_goes_with_what_is_said_and_can_be_read_in_the_conversation(page):
    attach(page, "notes.txt", b"A quire has `pages`.\n```\n")
    assert page.locator(".attached-chip").inner_text().startswith("notes.txt")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "What is it?")
    (message,) = sent.value.post_data_json["messages"]
    assert message["content"] == "What is it?\n\nFile notes.txt:\n````\nA quire has `pages`.\n```\n\n````"
    answer(page)
    assert page.locator(".attached-chip").count() == 0
    page.locator(".attached-file summary").click()
    assert "A quire has" in page.locator(".attached-file pre").inner_text()
    page.get_by_role("button", name="History").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as text").click()
    assert f"## You\n\n{message['content']}\n\n## Answer" in saved.value.path().read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "content", "kind", "told"),
    [
        ("a.bin", b"\x00\x01", "application/octet-stream", "is no text in UTF-8"),
        ("a.txt", b"x" * (512 * 1024 + 1), "text/plain", "more than 512 KiB"),
        ("a.png", b"x", "image/png", "this model reads text only"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_to_do(page, name, content, kind, told):
    attach(page, name, content, kind)
    problem = page.locator(".attachments .error-text")
    problem.wait_for()
    assert told in problem.inner_text() and page.locator(".attached-chip").count() == 0


def test_a_picture_is_dropped_seen_and_sent_where_the_model_sees(open_page, start_server, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    model = make_tiny_vision("LlavaForConditionalGeneration", tmp_path / "model")
    server = start_server("--model", str(model), "--max-model-len", "256")
    page = open_page(server.url)
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 30, 30)).save(buffer, "PNG")
    page.evaluate(
        """(text) => {
          const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], "red.png", { type: "image/png" }));
          const options = { dataTransfer: data, bubbles: true, cancelable: true };
          document.querySelector(".stage").dispatchEvent(new DragEvent("drop", options));
        }""",
        base64.b64encode(buffer.getvalue()).decode(),
    )
    page.locator(".attached-chip").wait_for()
    change(page, "Max tokens", "4")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "What colour?")
    (message,) = sent.value.post_data_json["messages"]
    picture, text = message["content"]
    assert text == {"type": "text", "text": "What colour?"}
    assert base64.b64decode(picture["image_url"]["url"].partition(",")[2]) == buffer.getvalue()
    answer(page)
    drawn = page.locator("canvas.attached-image")
    until(page, "document.querySelector('canvas.attached-image').width === 20")
    red = "(node) => [...node.getContext('2d').getImageData(5, 5, 1, 1).data]"
    assert drawn.evaluate(red)[:3] == [200, 30, 30]


def test_the_settings_of_a_card_hold_for_its_message_alone(page):
    page.get_by_role("button", name="Get JSON of a schema").click()
    assert json.loads(answer(page).locator("figure.code code").inner_text())["age"] == 7
    assert page.get_by_label("The answer is").input_value() == "text"
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, ASKED)
    assert "response_format" not in sent.value.post_data_json
    assert answer(page, 2).locator(".prose").inner_text() == ANSWERED


def test_how_sure_the_model_is_is_shown_at_once_and_without_chance(page):
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="See how sure it is").click()
    assert sent.value.post_data_json["temperature"] == 0 and sent.value.post_data_json["logprobs"] is True
    assert answer(page).locator(".heat-map .token").count() > 3
    assert page.get_by_label("Temperature").input_value() == ""
