"""The console's frame: theme, keys, the API key, sizes of screens, and what a screen reader is told."""

import pytest

from .conftest import answer, refusal, say, until

ALL_TABS = ("playground", "engine", "requests")


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def brightness(page) -> float:
    """Of the page, 0 to 255."""
    text = background(page)
    return sum(float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]) / 3


def test_the_theme_follows_the_system_and_the_switch(open_page):
    page = open_page(color_scheme="dark")
    assert brightness(page) < 60
    page.emulate_media(color_scheme="light")
    assert brightness(page) > 200
    switch = page.get_by_role("button", name="Theme")
    switch.click()
    switch.click()
    assert switch.inner_text() == "Theme: dark" and brightness(page) < 60
    page.reload()
    assert brightness(page) < 60 and switch.inner_text() == "Theme: dark"
    switch.click()
    assert brightness(page) > 200


CONTRAST = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((value) => value / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement("span"));
  const color = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const pairs = { ink: ["paper", "sheet", "sunken", "accent-soft"], "ink-soft": ["paper", "sheet", "sunken"],
    accent: ["paper", "sheet", "accent-soft"], "accent-ink": ["accent"], warm: ["sheet", "warm-soft"], bad: ["sheet", "bad-soft"],
    good: ["sheet", "sunken"], violet: ["paper"] };
  return Object.entries(pairs).flatMap(([front, backs]) => backs.map((back) => {
    const [low, high] = [luminance(color(front)), luminance(color(back))].sort((one, two) => one - two);
    return [`${front} on ${back}`, (high + 0.05) / (low + 0.05)];
  }));
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(open_page, scheme):
    """WCAG's contrast for normal text, 4.5 to 1, of every pair of ink and paper."""
    ratios = dict(open_page(color_scheme=scheme).evaluate(CONTRAST))
    assert len(ratios) > 15
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def test_everything_can_be_done_with_the_keyboard(page):
    """Ask, stop, look at probabilities, change tabs, without a pointer."""
    focused = "document.activeElement"
    assert page.evaluate(f"{focused}.id") == "composer"
    page.keyboard.type("What is 17 + 25?")
    page.keyboard.press("Enter")
    assert answer(page).locator(".prose").inner_text() == "17 + 25 = 42"
    page.keyboard.press("Alt+s")
    assert not page.locator("#settings").is_visible()
    page.keyboard.press("Alt+c")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0 and page.evaluate(f"{focused}.id") == "composer"
    page.keyboard.press("Alt+2")
    page.locator("#engine").wait_for()
    assert not page.locator("#playground").is_visible()
    page.locator("#tab-engine").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#requests").wait_for()
    assert page.evaluate(f"{focused}.id") == "tab-requests"
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate(f"{focused}.id") == "composer"
    page.keyboard.press("Shift+Tab")
    seen = [page.evaluate(f"{focused}.textContent") for _ in [0]]
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        seen.append(page.evaluate(f"{focused}.textContent"))
    assert {"Copy", "Retry", "Inspect", "Settings", "Code"} <= set(seen)
    page.keyboard.press("/")
    page.keyboard.press("Alt+n")
    assert page.locator(".turn").count() == 0


def test_escape_stops_an_answer(page):
    page.get_by_label("Go on after the end token").check()
    say(page, "Count from 1 to 25")
    page.wait_for_selector(".turn.assistant .prose:not(.empty)")
    page.keyboard.press("Escape")
    assert "stopped" in answer(page).locator(".stats").inner_text()


def test_an_answer_is_announced_once_it_is_complete(page):
    say(page, "What is 17 + 25?")
    answer(page)
    until(page, "document.getElementById('announcer').textContent === 'Answer: 17 + 25 = 42'")
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"


NAMELESS = """
() => [...document.querySelectorAll("button, input, select, textarea, [role=radio], [role=tab], [tabindex='0']")]
  .filter((node) => node.checkVisibility())
  .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length || node.getAttribute("aria-labelledby")))
  .map((node) => node.outerHTML.slice(0, 120))
"""


def test_every_control_has_a_name(page):
    for section in page.locator("#settings summary").all():
        if section.evaluate("node => !node.parentElement.open"):
            section.click()
    say(page, "What is 17 + 25?")
    answer(page)
    for tab in ALL_TABS:
        page.locator(f"#tab-{tab}").click()
        page.locator(f"#{tab}").wait_for()
        page.wait_for_timeout(200)
        assert page.evaluate(NAMELESS) == []


@pytest.mark.parametrize("width", [320, 390, 820])
def test_nothing_is_wider_than_the_screen(open_page, width):
    page = open_page(viewport={"width": width, "height": 740})
    say(page, "Count from 1 to 25")
    answer(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    assert page.get_by_label("Temperature").is_visible()
    page.get_by_role("button", name="Settings", exact=True).click()
    for tab in ALL_TABS:
        page.locator(f"#tab-{tab}").click()
        page.locator(f"#{tab}").wait_for()
        page.wait_for_timeout(300)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, tab
        assert page.locator(f"#{tab}").evaluate("node => node.scrollWidth <= node.clientWidth"), tab


def test_a_server_with_keys_is_opened_with_one_that_only_this_tab_keeps(open_page, start_server):
    server = start_server("--api-key", "tea-and-toast")
    page = open_page(server.url, ready=False, expect_errors=True)
    page.get_by_text("needs an API key").wait_for()
    say(page, "What is 17 + 25?")
    assert "wants an API key" in refusal(page)
    page.get_by_role("button", name="API key", exact=True).click()
    page.get_by_label("Key", exact=True).fill("tea-and-toast")
    page.keyboard.press("Enter")
    page.wait_for_selector('.dot[data-state="ready"]')
    page.get_by_role("button", name="Retry").click()
    assert answer(page).locator(".prose").inner_text() == "17 + 25 = 42"
    kept = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert "tea-and-toast" in kept[0] and kept[2] == "" and "tea-and-toast" not in str(kept[1])
    page.get_by_role("button", name="Code").click()
    code = page.get_by_role("dialog").inner_text()
    assert "$QUIRE_API_KEY" in code and "tea-and-toast" not in code


def test_no_console_leaves_nothing_at_the_root(start_server):
    server = start_server("--no-console")
    missing = server.client.get("/")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "route_not_found"
    assert server.client.get("/v1/models").status_code == 200


def test_a_broken_address_harms_nothing(open_page):
    page = open_page(path="#requests/%E0%A4%A", expect_errors=True)
    page.locator("#requests").wait_for()
    assert page.get_by_label("Request id").input_value() == "%E0%A4%A"
    page.goto(page.url.partition("#")[0] + "#nowhere")
    page.locator("#playground").wait_for()
