"""Every snippet of docs/clients.md does what the page says, with the real client.

A client that is not installed beside Quire may live in other environments: CLIENTS_PYTHON names their interpreters, separated by
colons, as some clients insist on older packages than ours (tests/clients/requirements.txt). CLIENTS_NODE names the folder where
npm has installed those of JavaScript (tests/clients/package.json).
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.console.conftest import browser  # noqa: F401

import quire

PAGE = Path(__file__).parents[2] / "docs/clients.md"
INTERPRETERS = [sys.executable, *filter(None, os.environ.get("CLIENTS_PYTHON", "").split(":"))]
ALWAYS = {"curl", "openai", "anthropic", "langchain-openai", "A page in a browser"}
"""What runs in every test run where it is installed; the others are slow to import or to run."""


@dataclass
class Snippet:
    """A piece of code, what it prints, and where it stands."""

    title: str
    part: str
    packages: list[str]
    language: str
    code: str
    prints: str


def read_page() -> list[Snippet]:
    """The snippets that name an address, in their order. Packages stand for a whole section."""
    snippets: list[Snippet] = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        packages = re.findall(r"^`pip install '?([\w-]+)", section, re.MULTILINE)
        packages += [
            name for line in re.findall(r"^`npm install (.+)`$", section, re.MULTILINE) for name in line.split()
        ]
        for part in section.split("\n### "):
            blocks = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            [(language, code), (_, prints)] = blocks
            snippets.append(
                Snippet(section.split("\n")[0], part.split("\n")[0], packages, language, code, prints.strip())
            )
    return snippets


SNIPPETS = read_page()


@functools.cache
def installed(python: str) -> set[str]:
    """Names of the packages that an interpreter has."""
    code = "import importlib.metadata as m; print(*(d.metadata['Name'].lower() for d in m.distributions()))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {name.replace("_", "-") for name in found.stdout.split()}


def interpreter_for(packages: list[str]) -> str:
    """The first that has them all."""
    for python in INTERPRETERS:
        if installed(python) >= set(packages):
            return python
    pytest.skip(f"needs {' and '.join(packages)}, here or in an environment that CLIENTS_PYTHON names")


def marked(snippet: Snippet):
    name = snippet.title if snippet.part == snippet.title else f"{snippet.title}: {snippet.part}"
    return pytest.param(snippet, id=name, marks=() if snippet.title in ALWAYS else pytest.mark.exhaustive)


def node_modules(packages: list[str]) -> Path:
    """The folder of JavaScript's packages, if it has these."""
    found = Path(os.environ.get("CLIENTS_NODE", "")) / "node_modules"
    if shutil.which("node") is None or not all((found / name / "package.json").exists() for name in packages):
        pytest.skip(f"needs node, and {' and '.join(packages)} in the folder that CLIENTS_NODE names")
    return found.resolve()


@pytest.mark.parametrize("snippet", [marked(one) for one in SNIPPETS if one.language == "javascript" and one.packages])
def test_a_snippet_for_node_prints_what_the_page_says(snippet, demo, tmp_path):
    (tmp_path / "node_modules").symlink_to(node_modules(snippet.packages))
    (tmp_path / "snippet.mjs").write_text(snippet.code.replace("http://127.0.0.1:8000", demo.url))
    command = ["node", "--no-warnings", "snippet.mjs"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.stdout.strip() == snippet.prints, ran.stderr[-4000:] + demo.log()[-2000:]
    assert demo.gauges() == dict.fromkeys(demo.gauges(), 0.0)


@pytest.mark.parametrize("snippet", [marked(one) for one in SNIPPETS if one.language == "java"])
def test_a_snippet_for_java_prints_what_the_page_says(snippet, demo, tmp_path):
    if shutil.which("java") is None:
        pytest.skip("needs java")
    (tmp_path / "Ask.java").write_text(snippet.code.replace("http://127.0.0.1:8000", demo.url))
    ran = subprocess.run(["java", "Ask.java"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.stdout.strip() == snippet.prints, ran.stderr[-4000:] + demo.log()[-2000:]


@pytest.mark.parametrize("snippet", [marked(one) for one in SNIPPETS if not one.language.startswith("java")])
def test_a_snippet_prints_what_the_page_says(snippet, request, tmp_path):
    python = interpreter_for(snippet.packages)
    server = request.getfixturevalue("embedder" if '"embedder"' in snippet.code else "demo")
    environment = {
        **os.environ,
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "TOKENIZER": str(Path(quire.__path__[0]) / "assets/demo"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HOME": str(tmp_path / "cache"),
        "LLM_USER_PATH": str(tmp_path),
    }
    code = snippet.code.replace("http://127.0.0.1:8000", server.url)
    command = [python, "-c", code] if snippet.language == "python" else ["bash", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.stdout.strip() == snippet.prints, ran.stderr[-4000:] + server.log()[-2000:]
    assert server.gauges() == dict.fromkeys(server.gauges(), 0.0)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of a page that another server shows."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>Hello")

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("snippet", [marked(one) for one in SNIPPETS if one.title == "A page in a browser"])
def test_a_page_of_another_origin_reads_a_stream(snippet, browser, elsewhere, demo):  # noqa: F811
    page = browser.new_page()
    lines: list[str] = []
    page.goto(elsewhere)
    page.on("console", lambda message: lines.append(message.text))
    page.evaluate(f"(async () => {{ {snippet.code.replace('http://127.0.0.1:8000', demo.url)} }})()")
    page.close()
    assert lines[-1:] == [snippet.prints]


def test_every_client_has_a_snippet():
    assert {one.title for one in SNIPPETS} >= ALWAYS and len(SNIPPETS) > len(ALWAYS)
    assert all("http://127.0.0.1:8000" in one.code for one in SNIPPETS)
