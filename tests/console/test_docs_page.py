"""The page of the server's routes works without the internet, and reads every part of openapi.json."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.console.test_console_routes import client

from quire.entrypoints.http.openapi import build_openapi
from quire.entrypoints.server.operations import OPERATIONS
from quire.entrypoints.server.routes import WORK

FOLDER = Path(__file__).parents[2] / "src" / "quire" / "assets" / "docs"

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_everything_that_the_page_loads_comes_from_the_server(path):
    async with client(console=False) as http:
        page = await http.get(path)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) >= 4 and "{assets}" not in page.text
        for name in loaded:
            assert not name.startswith(("http", "//")) and (await http.get(f"/{name}")).status_code == 200
    for file in FOLDER.iterdir():
        assert not re.search(r"https?://[a-z]", file.read_text("utf-8"))


async def test_there_is_no_page_where_the_operator_wants_none():
    async with client(docs=False) as http:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await http.get(path)).status_code == 404


def test_the_script_reads_the_fields_of_every_route(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js is installed")
    (tmp_path / "spec.json").write_text(json.dumps(build_openapi([*WORK, *OPERATIONS])))
    (tmp_path / "docs.mjs").write_text((FOLDER / "docs.js").read_text("utf-8"))
    (tmp_path / "run.mjs").write_text(
        """
        import { readFileSync } from "node:fs";
        import { curlLine, fieldRows } from "./docs.mjs";
        const spec = JSON.parse(readFileSync("spec.json"));
        const rows = {};
        for (const [path, { post }] of Object.entries(spec.paths)) {
          const body = post?.requestBody?.content["application/json"];
          if (!body) continue;
          const line = curlLine("http://h" + path, "POST", JSON.stringify(body.example));
          rows[path] = [fieldRows(body.schema, spec), line];
        }
        console.log(JSON.stringify(rows));
        """
    )
    ran = subprocess.run([node, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    routes = json.loads(ran.stdout)
    fields, line = routes["/v1/completions"]
    assert any(name == "prompt" and kind.startswith("string") and default == "null" for name, kind, default in fields)
    assert ["messages", "list of object", "required"] in routes["/v1/chat/completions"][0]
    assert line.startswith("curl 'http://h/v1/completions' -H 'Content-Type: application/json' -d '{")
    assert all(fields for path, (fields, _) in routes.items() if path != "/invocations")
