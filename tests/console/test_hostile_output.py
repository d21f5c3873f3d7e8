"""What a model writes is text, whatever it looks like. The server's answers are replaced by hostile ones here."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.oracles.server_process import ServerProcess

from .conftest import answer, opened, say

HOSTILE = [
    '<img src=x onerror="window.hacked = 1">',
    "<script>window.hacked = 1</script>",
    "</code></pre><svg onload=window.hacked=1>",
    "```html\n</code></pre><img src=x onerror=window.hacked=1>\n```",
    '```"><img src=x onerror=window.hacked=1>\ncode\n```',
    "| a | <img src=x onerror=window.hacked=1> |\n|---|---|\n| <b>x</b> | </td><script>window.hacked=1</script> |",
    "- <iframe srcdoc='<script>parent.hacked=1</script>'>\n  - <object data=javascript:window.hacked=1>",
    "# <style>body { display: none }</style>",
    "> <a href='javascript:window.hacked=1' id=x>click</a>",
    "&lt;img src=x onerror=window.hacked=1&gt;",
    "<b onmouseover=window.hacked=1>**bold <i>both</i>**</b>",
]
BAD_LINKS = [
    "[a](javascript:window.hacked=1)",
    "[a](JaVaScRiPt:window.hacked=1)",
    "[a](\x01javascript:window.hacked=1)",
    "[a](java\tscript:window.hacked=1)",
    "[a](data:text/html,<script>parent.hacked=1</script>)",
    "[a](vbscript:x)",
    "[a](/relative)",
    "[a](blob:null/1)",
    "![a](javascript:window.hacked=1)",
]


@pytest.fixture(scope="module")
def one_page(browser: Any, demo: ServerProcess) -> Iterator[tuple[Any, list[str]]]:
    """The console, and what has failed in it: a window of its own for each text would take longer than all else."""
    with opened(browser, demo) as (open_, problems):
        yield open_(), problems


@pytest.fixture
def page(one_page: tuple[Any, list[str]]) -> Iterator[Any]:
    """The console, as it is opened for the first time."""
    page, problems = one_page
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.reload()
    page.wait_for_selector('.dot[data-state="ready"]')
    yield page
    page.unroute_all()
    assert problems == []


def stream_of(*deltas: dict, logprobs: dict | None = None) -> str:
    """A stream of chat chunks."""
    choices = [[{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}] for delta in deltas]
    choices += [[{"index": 0, "delta": {}, "finish_reason": "stop"}]]
    chunks = [{"id": "chatcmpl-x", "choices": choice} for choice in choices]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page, *deltas: dict, **options):
    body = stream_of(*deltas, **options)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    say(page, "x")
    return answer(page)


def is_unharmed(page) -> bool:
    page.wait_for_timeout(20)
    found = page.locator("main :is(script, img, svg[onload], iframe, object, embed, style, link, form[action])").count()
    return page.evaluate("window.hacked === undefined") and found == 0


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_in_an_answer_is_shown_as_it_was_written(page, text):
    turn = answer_with(page, {"content": text[:7]}, {"content": text[7:]})
    assert is_unharmed(page)
    letters = "".join(char for char in text if char.isalpha())
    shown = turn.locator(".prose").evaluate("node => node.textContent")
    for word in ("onerror", "script", "onload", "iframe", "style"):
        assert shown.count(word) == letters.count(word)


@pytest.mark.parametrize("text", BAD_LINKS)
def test_links_that_could_run_something_are_text(page, text):
    turn = answer_with(page, {"content": text})
    assert turn.locator("a").count() == 0 and is_unharmed(page)


def test_good_links_open_apart_and_tell_their_target(page):
    turn = answer_with(page, {"content": "[a](https://x.test/b) ![pic](https://y.test/p.png) see https://z.test/q."})
    links = turn.locator(".prose a")
    targets = [link.get_attribute("href") for link in links.all()]
    assert targets == ["https://x.test/b", "https://y.test/p.png", "https://z.test/q"]
    assert {link.get_attribute("rel") for link in links.all()} == {"noopener noreferrer nofollow"}
    assert {link.get_attribute("target") for link in links.all()} == {"_blank"}
    assert is_unharmed(page)


def test_reasoning_calls_tokens_and_errors_are_text_too(page):
    bad = "<img src=x onerror=window.hacked=1>"
    call = {"index": 0, "id": "1", "function": {"name": bad, "arguments": json.dumps({bad: bad})}}
    entry = {"token": bad, "logprob": -0.1, "top_logprobs": [{"token": bad, "logprob": -0.1}]}
    deltas = ({"reasoning": bad}, {"content": bad}, {"tool_calls": [call]})
    turn = answer_with(page, *deltas, logprobs={"content": [entry]})
    assert turn.locator(".call-title code").inner_text() == bad
    turn.get_by_role("radio", name="Heat map").click()
    turn.locator(".token").first.focus()
    assert bad.replace(" ", "·") in page.locator(".alternatives .chosen").inner_text()
    assert is_unharmed(page)


MARKDOWN = """# Title

A *soft* and **strong** `code` line with ~~no~~ and snake_case_name.

- one
- two
  1. three
  2. four

> quoted
> twice

| left | right |
|:-----|------:|
| a    | `b|c` \\| d |

```python
if a < b: print("**")
```

---
2 * 3 * 4"""


def test_markdown_becomes_the_right_nodes(page):
    prose = answer_with(page, {"content": MARKDOWN}).locator(".prose")
    assert prose.locator("h3").inner_text() == "Title"
    assert prose.locator("em").all_inner_texts() == ["soft"] and prose.locator("strong").all_inner_texts() == ["strong"]
    assert prose.locator("s").all_inner_texts() == ["no"] and "snake_case_name" in prose.inner_text()
    assert prose.locator("ul > li").count() == 2 and prose.locator("ul ol > li").all_inner_texts() == ["three", "four"]
    assert prose.locator("blockquote").inner_text() == "quoted\ntwice"
    assert prose.locator("th").all_inner_texts() == ["left", "right"]
    assert prose.locator("th").nth(1).get_attribute("class") == "to-end"
    assert prose.locator("figure.code pre").inner_text() == 'if a < b: print("**")'
    assert prose.locator("figcaption span").inner_text() == "python"
    assert prose.locator("hr").count() == 1 and prose.inner_text().endswith("2 * 3 * 4")


def test_streamed_markdown_ends_as_the_whole_does(page):
    whole = answer_with(page, {"content": MARKDOWN}).locator(".prose").inner_text()
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="New chat").click()
    pieces = [{"content": MARKDOWN[at : at + 3]} for at in range(0, len(MARKDOWN), 3)]
    assert answer_with(page, *pieces).locator(".prose").inner_text() == whole


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 20000,
        "**" * 20000,
        "[" * 40000,
        "[a](" * 10000,
        "> " * 20000 + "x",
        "`" * 30001,
        "`a``b" * 8000,
        "- " * 5000,
        "| a " * 5000 + "\n" + "|---" * 5000,
        "_" * 30000,
        "~~a " * 9000,
        "\\" * 30001,
        "1. a\n" * 3000,
        "h" * 30000,
    ],
)
def test_no_text_is_too_much_work(page, text):
    """Each would take minutes were any part of it quadratic with a large factor, or overflow the stack."""
    turn = answer_with(page, {"content": text})
    assert turn.locator(".prose").evaluate("node => node.childElementCount") > 0
