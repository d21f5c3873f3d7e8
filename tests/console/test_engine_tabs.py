"""The live view of the engine and the inspector of requests, against what the server really did."""

from collections.abc import Callable

import pytest
from tests.oracles.server_process import ServerProcess

from .conftest import answer, change, say, until

LONG_SYSTEM = "You are a helpful assistant. " + "Books have pages. " * 40


@pytest.fixture(scope="module")
def demo(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server that nobody else has asked."""
    return start_server()


def tile(page, label: str):
    return page.locator(".tile:visible").filter(has_text=label).locator("dd").first


def test_the_engine_view_shows_a_running_request_and_its_end(page):
    change(page, "Max tokens", "1800")
    page.get_by_label("Go on after the end token").check()
    say(page, "Count from 1 to 25")
    page.wait_for_selector(".turn.assistant .prose:not(.empty)")
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector("#engine .live .state.is-decode")
    assert tile(page, "Running").inner_text() == "1" and tile(page, "Waiting").inner_text() == "0"
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#engine .tile dd').textContent === '0'")
    until(page, "document.querySelector('#engine .live tbody .state')?.textContent === 'abort'")
    assert page.locator("#engine .live tbody tr").count() == 1
    for title in ("Tokens a second", "Step time against prediction", "Requests", "Pages in use"):
        picture = page.locator(".chart").filter(has=page.get_by_text(title, exact=True)).get_by_role("img")
        assert picture.get_attribute("aria-label").startswith(f"{title}: ") and picture.locator("path").count() >= 1
    steps = page.locator(".chart").nth(1)
    assert "predicted" in steps.locator(".chart-legend").inner_text()
    box = steps.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 20)
    assert steps.locator(".chart-cursor").is_visible()


def test_the_engine_is_asked_only_while_it_is_looked_at(page):
    asked = []
    page.on("request", lambda sent: asked.append(sent.url) if sent.url.endswith("/console/state") else None)
    page.wait_for_timeout(1500)
    assert asked == []
    page.get_by_role("tab", name="Engine").click()
    until(page, "document.querySelector('#engine .tile dd').textContent !== ''")
    while len(asked) < 3:
        page.wait_for_timeout(100)
    page.get_by_role("tab", name="Playground").click()
    page.wait_for_timeout(300)
    before = len(asked)
    page.wait_for_timeout(2000)
    assert len(asked) == before


def test_the_focus_stays_in_the_table_while_it_is_renewed(page, demo):
    demo.client.post("/v1/completions", json={"prompt": "one two", "max_tokens": 2})
    page.get_by_role("tab", name="Engine").click()
    link = page.locator("#engine .live tbody .link").first
    link.focus()
    name = link.get_attribute("title")
    page.evaluate("window.before = document.activeElement")
    until(page, "document.activeElement !== window.before && document.activeElement.matches('.link')")
    assert page.evaluate("document.activeElement.title") == name
    page.keyboard.press("Enter")
    assert page.locator(".request-title").inner_text() == name


def test_inspect_leads_from_an_answer_to_what_happened_to_it(page):
    say(page, "What is 17 + 25?")
    with page.expect_response("**/console/requests/**") as response:
        answer(page).get_by_role("button", name="Inspect").click()
    shown = response.value.json()
    assert page.locator(".request-title").inner_text() == shown["id"]
    events = page.locator(".events tbody tr")
    kinds = [event["kind"] for event in shown["events"]]
    assert [text.replace(" ", "_") for text in events.locator(".state").all_inner_texts()] == kinds
    assert {"queued", "scheduled", "chunk", "first_token", "decode", "finished"} <= set(kinds)
    for lane in ("frontend", "queue", "prefill", "decode"):
        assert page.locator(f".span.{lane}").count() == 1
    assert "prompt tokens came from the cache" in page.locator(".prefix").inner_text()
    assert page.locator(".recent-item[aria-current]").get_attribute("title") == shown["id"]
    page.go_back()
    page.locator("#playground").wait_for()
    assert page.locator(".turn").count() == 2


def test_the_inspector_tells_where_a_prompt_left_the_prefix_cache_and_why(page):
    change(page, "System prompt", LONG_SYSTEM)
    for number, text in enumerate(("What is 17 + 25?", "Who are you?"), 1):
        page.get_by_role("button", name="New chat").click()
        with page.expect_response("**/v1/chat/completions") as sent:
            say(page, text)
        answer(page)
        request_id = sent.value.headers["x-request-id"]
        page.goto(page.url.partition("#")[0] + f"#requests/{request_id}")
        until(page, "id => document.querySelector('.request-title')?.textContent.includes(id)", request_id)
        told = page.locator(".prefix").inner_text()
        if number == 2:
            break
        page.get_by_role("tab", name="Playground").click()
    hit = int(page.locator(".prefix strong").first.inner_text().split(" of ")[0])
    assert hit >= 64 and hit % 16 == 0
    assert f"The prompt left it at token {hit}: differs from request" in told
    nearest = page.locator(".prefix .link").get_attribute("title")
    page.locator(".prefix .link").click()
    until(page, "id => document.querySelector('.request-title')?.textContent === id", nearest)


def test_a_request_that_nobody_knows_is_told(open_page):
    page = open_page(expect_errors=True)
    page.get_by_role("tab", name="Requests").click()
    page.get_by_label("Request id").fill("nothing/../<b>x</b>")
    page.keyboard.press("Enter")
    page.locator("#requests .notice").wait_for()
    assert "nothing/../<b>x</b>" in page.locator("#requests .notice").inner_text()


STALLED = {
    "id": "r-1~0",
    "siblings": [],
    "is_finished": True,
    "arrived_ago_s": 1.0,
    "events_left_out": 3,
    "events": [
        {"t_s": 0.0, "kind": "queued", "detail": {"requests_in_queue": 2}},
        {"t_s": 0.0, "kind": "stall", "detail": {"cause": "tokens", "behind": "r-0~0", "s": 0.1}},
        {"t_s": 0.1, "kind": "stall", "detail": {"cause": "pages", "s": 0.3}},
        {"t_s": 0.4, "kind": "scheduled", "detail": {"computed_tokens": 16, "row": 1, "free_pages": 9}},
        {"t_s": 0.4, "kind": "chunk", "detail": {"from_token": 16, "to_token": 80, "step": 4, "ms": 50.0}},
        {"t_s": 0.5, "kind": "preempted", "detail": {"cause": "pages", "computed_tokens": 80, "for_request": "r-0~0"}},
        {"t_s": 0.5, "kind": "queued", "detail": {"requests_in_queue": 0}},
        {"t_s": 0.7, "kind": "scheduled", "detail": {"computed_tokens": 64, "row": 1, "free_pages": 30}},
        {"t_s": 0.7, "kind": "chunk", "detail": {"from_token": 64, "to_token": 96, "step": 9, "ms": 40.0}},
        {"t_s": 0.74, "kind": "first_token", "detail": {}},
        {"t_s": 0.74, "kind": "decode", "detail": {"tokens": 10, "s": 0.26, "tokens_per_second": 38.5}},
        {"t_s": 1.0, "kind": "finished", "detail": {"reason": "length", "output_tokens": 11}},
    ],
    "prefix": {
        "prompt_tokens": 96, "hit_tokens": 16, "left_at_token": 16, "why": "evicted", "request": "r-0~0", "common_tokens": 40,
        "explanation": "request r-0~0 had these pages; they were given to others since, or not kept",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", ["lanes", "words"])
def test_stalls_and_preemptions_are_drawn_and_said(page, what):
    page.route("**/console/requests/**", lambda route: route.fulfill(json=STALLED))
    page.goto(page.url.partition("#")[0] + "#requests/r-1")
    page.wait_for_selector(".request-title")
    if what == "lanes":
        counts = {lane: page.locator(f".span.{lane}").count() for lane in ("queue", "stall", "prefill", "decode")}
        assert counts == {"queue": 2, "stall": 3, "prefill": 2, "decode": 1} and page.locator(".span.mark").count() == 1
        assert tile(page, "In the queue").inner_text() == "600 ms" and tile(page, "Stalled").inner_text() == "400 ms"
        return
    said = page.locator(".events").inner_text()
    assert "waits 100 ms behind another request: the step's budget of tokens is spent" in said
    assert "waits 300 ms: too few pages are free" in said
    assert "gives its pages up after 80 tokens: too few pages are free" in said
    assert "3 events from the middle were not kept" in page.locator("#requests").inner_text()
    assert "they were given to others since" in page.locator(".prefix").inner_text()


ROW = {"requests": 3, "prompt_tokens": 300, "generation_tokens": 100, "refused": 0}
HAPPENED = {
    "events": [
        {"at": 1767600000.0, "kind": "restart", "text": "the core was killed by SIGKILL", "count": 1},
        {"at": 1767600001.0, "kind": "replay", "text": "request <b>r-1</b> goes on", "count": 16},
    ],
    "event_totals": {"restart": 1, "replay": 16},
    "batches": [
        {
            "id": "batch_" + 40 * "a",
            "status": "in_progress",
            "request_counts": {"total": 200, "completed": 47, "failed": 3},
        },
        {"id": "batch_b", "status": "validating", "request_counts": {"total": 0, "completed": 0, "failed": 0}},
    ],
    "tenants": {"small": ROW, "<i>large</i>": {**ROW, "generation_tokens": 900, "refused": 2}},
}


def test_what_happened_and_each_tenant_s_part_are_shown(open_page):
    page = open_page(viewport={"width": 390, "height": 780})

    def answer_with_more(route):
        route.fulfill(json={**route.fetch().json(), **HAPPENED})

    page.route("**/console/state", answer_with_more)
    page.get_by_role("tab", name="Engine").click()
    rows = page.locator("#engine .happened tbody tr")
    until(page, "document.querySelectorAll('#engine .happened tbody .state').length === 2")
    assert rows.locator(".state").all_inner_texts() == ["request went on", "core restarted"]  # the latest first
    assert "request <b>r-1</b> goes on" in rows.first.inner_text() and rows.first.inner_text().endswith("16")
    assert "1 restarts, 16 requests went on" in page.locator(".happened-totals").inner_text()
    tenants = page.locator("#engine .tenants tbody tr")
    cells = [row.split("\t") for row in tenants.all_inner_texts()]
    assert [(row[0], row[3], row[5]) for row in cells] == [("<i>large</i>", "900", "2"), ("small", "100", "0")]
    batches = [row.split("\t") for row in page.locator("#engine .batches tbody tr").all_inner_texts()]
    assert [row[1:] for row in batches] == [["in_progress", "50 (25 %)", "3", "200"], ["validating", "–", "0", "0"]]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # tables scroll by themselves


def test_while_the_core_is_started_again_the_view_says_so_and_goes_on(page):
    page.route(
        "**/console/state",
        lambda route: route.fulfill(
            json={"model": "m", "problem": "the engine core is started again: killed", **HAPPENED}
        ),
    )
    page.get_by_role("tab", name="Engine").click()
    page.locator("#engine .notice").wait_for()
    assert page.locator("#engine .notice").inner_text() == "the engine core is started again: killed"
    assert page.locator("#engine .happened .state").count() == 2
    page.unroute("**/console/state")
    until(page, "document.querySelector('#engine .notice').hidden")
    assert page.locator("#engine .tenants").is_hidden()  # nobody names tenants
    assert page.locator("#engine .batches").is_hidden()


def test_charts_have_times_and_begin_with_what_the_server_remembers(open_page, demo):
    demo.client.post("/v1/completions", json={"prompt": "one two", "max_tokens": 20, "ignore_eos": True})
    page = open_page()
    page.get_by_role("tab", name="Engine").click()
    until(page, "document.querySelectorAll('#engine .chart-ticks span').length === 12")
    ticks = page.locator("#engine .chart-ticks").first.locator("span").all_inner_texts()
    assert all(":" in tick for tick in ticks)
    assert page.locator("#engine .chart-ticks").nth(1).locator("span").last.inner_text() == "the last step"
    assert page.locator("#engine .live tbody time").count() > 0


def test_first_words_are_shown_only_where_the_log_may_have_them(open_page, start_server, page):
    say(page, "What is 17 + 25?")
    answer(page)
    page.get_by_role("tab", name="Engine").click()
    page.locator("#engine .live tbody tr").first.wait_for()
    assert page.locator(".first-words").count() == 0
    server = start_server("--enable-log-requests", "--log-prompts")
    told = open_page(server.url)
    say(told, "What is 17 + 25?")
    answer(told)
    told.get_by_role("tab", name="Engine").click()
    told.locator("#engine .first-words").first.wait_for()
    assert "What is 17 + 25?" in told.locator("#engine .first-words").first.inner_text()


def test_what_the_server_finds_is_shown_with_what_to_set(page, demo):
    page.route("**/console/findings", lambda route: route.fulfill(json={
        "seconds": 3600.0,
        "findings": [
            {"check": "queue", "state": "fine", "seen": "1 runs", "to_do": ""},
            {"check": "stalls", "state": "look", "seen": "rows 9.0 s", "to_do": "a larger --max-num-seqs"},
        ],
    }))  # fmt: skip
    page.get_by_role("tab", name="Engine").click()
    found = page.get_by_role("region", name="What to look at")
    found.wait_for()
    assert found.get_by_role("heading").inner_text() == "The last hour: 1 to look at"
    assert found.locator("dt").first.inner_text().split() == ["look", "stalls"], "what is not fine comes first"
    assert "--max-num-seqs" in found.locator("dd").first.inner_text()
    page.unroute("**/console/findings")
    page.reload()
    page.get_by_role("tab", name="Engine").click()
    until(page, "document.querySelectorAll('.findings dt').length >= 6")
