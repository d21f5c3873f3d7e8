"""A real server on the demo model, and a real Chromium that looks at it. Without Chromium or Playwright these tests skip."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.oracles.server_process import SERVE, ServerProcess

FLAGS = ("--port", "0", "--max-model-len", "2048", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # The first two would draw lists below an address field that nobody sees, for each page anew. This flag takes the place of
    # Playwright's own: the others are those of them that matter to a page of this machine.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,PaintHolding,HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,"
    "MediaRouter,LensOverlay,OptimizationHints,NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch",
]
WAIT_MS = 30_000


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server with flags; it ends with the module."""
    servers: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        servers.append(ServerProcess(*SERVE, *FLAGS, "--disable-uvicorn-access-log", *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def demo() -> Iterator[ServerProcess]:
    """The server of all tests that look at no figures of it."""
    server = ServerProcess(*SERVE, *FLAGS, "--disable-uvicorn-access-log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. Of a module, not of the session: Playwright's event loop would stand in the way of other tests."""
    api = pytest.importorskip("playwright.sync_api", reason="the console's tests need playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        yield launched
        launched.close()


@contextlib.contextmanager
def opened(browser: Any, demo: ServerProcess) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Opens the console in a fresh context each time; and what has failed in it or gone to another host."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_(url: str = "", *, path: str = "", ready: bool = True, expect_errors: bool = False, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 820}, "reduced_motion": "reduce"} | options
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        host = urlsplit(url or demo.url).netloc
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda sent: problems.append(sent.url) if urlsplit(sent.url).netloc != host else None)
        if not expect_errors:
            page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"{url or demo.url}/{path}")
        if ready:
            page.wait_for_selector('.dot[data-state="ready"]')
        return page

    yield open_, problems
    for context in contexts:
        context.close()


@pytest.fixture
def open_page(browser: Any, demo: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the console in a fresh context; at the end nothing may have failed in it or gone to another host."""
    with opened(browser, demo) as (open_, problems):
        yield open_
    assert problems == []


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    """The console on the demo model, ready."""
    return open_page()


def say(page: Any, text: str) -> None:
    """Type a message and send it."""
    page.fill("#composer", text)
    page.press("#composer", "Enter")


def answer(page: Any, number: int = 1) -> Any:
    """The `number`th answer, once it is complete."""
    turn = page.locator(".turn.assistant").nth(number - 1)
    turn.locator(".stats:not(:empty)").wait_for()
    page.wait_for_selector(".turn.assistant[aria-busy=true]", state="detached")
    return turn


def refusal(page: Any) -> str:
    """What is said in the place of an answer."""
    notice = page.locator(".turn.assistant .notice.bad")
    notice.wait_for()
    return notice.inner_text()


def change(page: Any, label: str, value: str) -> None:
    """Set a field of the settings, in whatever section it stands."""
    field = page.get_by_label(label, exact=True)
    section = page.locator("#settings details").filter(has=field)
    if section.get_attribute("open") is None:
        section.locator("summary").click()
    if field.evaluate("node => node.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)


def until(page: Any, expression: str, argument: Any = None) -> None:
    """Wait until a JavaScript expression, or a function of `argument`, is true. (`page.wait_for_function` needs `eval` in
    the page, which the console's policy forbids.)"""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(expression, argument):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")
