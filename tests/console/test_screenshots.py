"""Pictures of the console for docs/console.md. `CONSOLE_IMAGES=docs/images` writes them there; otherwise they are thrown away.

The test holds without the variable too: every view that the guide shows can be reached and is not empty.
"""

import json
import os
import threading
from pathlib import Path

import httpx
import pytest
from tests.oracles.tiny_models import make_tiny_model

from .conftest import answer, change, say, until

MAX_BYTES = 200_000
SYSTEM = "You are a helpful assistant who knows a thing about books. " + "Books have pages. " * 40
LAST = "How many pages has a book that nobody has opened yet, and who would count them?"
QUESTIONS = ("Count from 1 to 25", "What is 17 + 25?", "Who are you?", "Sort: 5 2 9 1 7", "Tell me a joke.")


@pytest.fixture
def picture(tmp_path):
    """Takes a picture of a page, as `console-NAME.png`."""
    folder = Path(os.environ.get("CONSOLE_IMAGES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def take(page, name: str) -> None:
        page.mouse.move(0, 0)
        page.wait_for_timeout(200)
        path = folder / f"console-{name}.png"
        page.screenshot(path=path, animations="disabled")
        assert 8_000 < path.stat().st_size < MAX_BYTES

    return take


def test_pictures_of_the_playground(open_page, picture):
    page = open_page()
    picture(page, "welcome")
    page.get_by_role("button", name="Let it call a tool").click()
    answer(page).get_by_label("Result of calculate").fill("84")
    page.get_by_role("button", name="Send result").click()
    answer(page, 2)
    page.get_by_role("button", name="Reset all settings").click()
    change(page, "Thinking", "on")
    say(page, "Tom has 3 apples and buys 4 more. How many apples has Tom?")
    answer(page, 3).locator(".reasoning summary").click()
    page.locator("#settings").evaluate("node => node.scrollTo(0, 0)")
    picture(page, "tools")


def test_pictures_of_probabilities_and_tokens(open_page, picture):
    page = open_page(color_scheme="dark")
    change(page, "Seed", "3")
    change(page, "Temperature", "1")
    page.get_by_text("Token probabilities").click()
    page.get_by_label("Ask for them").check()
    page.locator("#settings").evaluate("node => node.scrollTo(0, 0)")
    say(page, "Spell the word necessary backwards.")
    turn = answer(page)
    turn.get_by_role("radio", name="Heat map").click()
    turn.locator(".token.drawn").first.focus()
    assert page.locator(".alternatives").is_visible()
    picture(page, "heat-map")
    page.get_by_role("radio", name="Tokens").click()
    page.get_by_label("Text to tokenize").fill("A quire is a gathering of pages.\nQuire runs 1,000 requests → at once.")
    page.wait_for_selector(".chip")
    picture(page, "tokens")


def test_a_picture_of_a_pooling_model(open_page, picture, start_server, tmp_path):
    server = start_server(
        "--model",
        str(make_tiny_model("Qwen3Model", tmp_path / "model")),
        "--max-model-len",
        "128",
        "--served-model-name",
        "my-embedder",
    )
    page = open_page(server.url)
    page.get_by_role("button", name="Compare").click()
    page.locator(".near td").first.wait_for()
    picture(page, "pooling")


def test_a_picture_of_a_telephone(open_page, picture):
    page = open_page(viewport={"width": 390, "height": 780}, device_scale_factor=2)
    page.get_by_role("button", name="Get JSON of a schema").click()
    assert json.loads(answer(page).locator("figure.code code").inner_text())["age"] == 7
    picture(page, "phone")


def test_pictures_of_the_engine_and_of_a_request(open_page, picture, demo):
    page = open_page()
    page.get_by_role("tab", name="Engine").click()
    ended = threading.Event()
    clients = [threading.Thread(target=keep_asking, args=(demo.url, number, ended)) for number in range(6)]
    for client in clients:
        client.start()
    try:
        until(page, "document.querySelectorAll('#engine .live tbody tr').length > 20")
        page.wait_for_timeout(6000)
        picture(page, "engine")
    finally:
        ended.set()
        for client in clients:
            client.join()
    dark = open_page(color_scheme="dark")
    say(dark, "What is 17 + 25?")
    answer(dark)
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": LAST}],
        "max_tokens": 60,
    }
    done = demo.client.post("/v1/chat/completions", json=body)
    dark.goto(dark.url.partition("#")[0] + f"#requests/{done.json()['id']}")
    dark.wait_for_selector(".events tbody tr")
    assert "came from the cache" in dark.locator(".prefix").inner_text()
    picture(dark, "request")


def keep_asking(url: str, number: int, ended: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        turn = number
        while not ended.is_set():
            turn += 1
            said = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]},
            ]
            limits = {"max_tokens": 40 + 60 * (turn % 4), "ignore_eos": turn % 2 == 0}
            client.post("/v1/chat/completions", json={"messages": said, **limits}).raise_for_status()
