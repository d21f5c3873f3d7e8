"""How the console's files are served: what protects the page, what may be kept by caches, who may see it."""

import re
from pathlib import Path

import httpx
import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.console.routes import build_console_routes
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app

FOLDER = Path(__file__).parents[2] / "src" / "quire" / "assets" / "console"
SCRIPTS = sorted(FOLDER.glob("*.js"))
MAX_MODULE_LINES = 400
MAX_LINES = 3300

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client(*, ready: bool = True, **options) -> httpx.AsyncClient:
    state = ServerState(ServerSettings(), FakeAsyncLLM() if ready else None)
    app = build_app(state, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_the_page_comes_with_a_policy_that_lets_nothing_foreign_in():
    async with client() as http:
        page = await http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-cache"


async def test_what_the_page_loads_is_there_and_may_be_kept_for_good():
    async with client() as http:
        page = (await http.get("/")).text
        paths = re.findall(r'(?:src|href)="(console/[^"]+)"', page)
        assert len(paths) >= 6 and "{assets}" not in page
        for path in paths:
            file = await http.get(f"/{path}")
            assert file.status_code == 200 and "immutable" in file.headers["cache-control"]
            assert file.headers["content-security-policy"]
            again = await http.get(f"/{path}", headers={"if-none-match": f'"old", W/{file.headers["etag"]}'})
            assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == file.headers["etag"]


async def test_modules_that_are_imported_are_served():
    served = {route.path.rpartition("/")[2] for route in build_console_routes()}
    imported = {name for path in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert imported <= served and {path.name for path in SCRIPTS} <= served


async def test_only_the_files_of_the_console_are_served():
    assets = next(route.path for route in build_console_routes() if route.path.endswith("/app.js")).rpartition("/")[0]
    async with client() as http:
        for path in ("console", assets, f"{assets}/nothing.js", f"{assets}/..%2f..%2fdemo%2fconfig.json", "index.html"):
            assert (await http.get(f"/{path.lstrip('/')}")).status_code == 404
        assert (await http.post("/")).status_code == 405


async def test_the_page_needs_no_key_and_everything_else_does():
    async with client(api_keys=["secret"]) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert (await http.get("/" + re.findall(r'src="(console/[^"]+)"', page.text)[0])).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/console/state")).status_code == 401
        assert (await http.get("/console/assets/x")).status_code == 401


async def test_the_page_is_there_while_the_engine_starts():
    async with client(ready=False) as http:
        assert (await http.get("/")).status_code == 200


async def test_a_proxy_may_strip_a_path():
    app = build_app(ServerState(ServerSettings(), FakeAsyncLLM()), root_path="/far", api_keys=["secret"])
    transport = httpx.ASGITransport(app, root_path="/far")
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        page = await http.get("/far/")
        assert page.status_code == 200
        script = re.findall(r'src="(console/[^"]+)"', page.text)[0]
        assert (await http.get(f"/far/{script}")).status_code == 200
        assert (await http.get("/far/v1/models")).status_code == 401


async def test_without_the_console_there_is_nothing():
    async with client(console=False, api_keys=["secret"]) as http:
        assert (await http.get("/")).status_code == 401
        for route in build_console_routes():
            known = await http.get(route.path, headers={"authorization": "Bearer secret"})
            assert known.status_code == 404


def test_files_are_short_and_name_no_other_host():
    lines = {path.name: len(path.read_text().splitlines()) for path in SCRIPTS}
    assert max(lines.values()) < MAX_MODULE_LINES and sum(lines.values()) < MAX_LINES, lines
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"""["'(](?:https?:)?//[\w.-]+\.""", text), path.name


def test_no_script_makes_html_of_text():
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function"
    assert {path.name for path in SCRIPTS if re.search(sinks, path.read_text())} == set()
