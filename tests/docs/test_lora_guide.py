"""docs/lora.md is true: its scripts print what it says, and its requests are answered by the server that it starts."""

import contextlib
import io
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from tests.docs.pages import ROOT, read_blocks

from quire import AsyncEngineArgs, AsyncLLM
from quire.entrypoints.cli.main import build_parser
from quire.entrypoints.cli.serve import make_app
from quire.entrypoints.http.listen import ListenOptions, open_socket

PAGE = ROOT / "docs" / "lora.md"
BLOCKS = read_blocks(PAGE)
SCRIPTS = [number for number, block in enumerate(BLOCKS) if "LLM(" in block.text]
REQUESTS = [block for block in BLOCKS if block.text.startswith("curl")]
CLIENTS = [block for block in BLOCKS if "openai.OpenAI(" in block.text]


def run(code: str) -> str:
    """What a script prints. It runs here, where torch and the clients are imported already."""
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        exec(compile(code, PAGE, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of the page's own server, with what its other sections turn on. It runs here too: its flags, application and
    engine are `quire serve`'s."""
    command = next(block.text for block in BLOCKS if block.text.startswith("quire serve --lora-modules"))
    flags = ["--enable-lora", "--cpu-threads", "1", "--kv-cache-memory-bytes", "64M", "--enable-prompt-embeds"]
    args = build_parser("serve").parse_args([*shlex.split(command)[2:], *flags])
    listener, options = open_socket(ListenOptions(port=0))
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(ROOT):
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        app, state = make_app(args, [])
        state.engine_or_none = engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        served = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=served.run, args=([listener],))
        thread.start()
        yield options.url
        served.should_exit = True
        thread.join()
        engine.shutdown()


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_script_prints_what_the_page_says(number: int):
    says = BLOCKS[number + 1]
    assert says.language == "text"
    lines = [line for line in run(BLOCKS[number].text).splitlines() if not re.match(r"(INFO|WARNING) ", line)]
    assert "\n".join(lines).strip() == says.text.strip()


def test_every_request_of_the_page_is_answered(server: str, tmp_path: Path):
    assert len(REQUESTS) == 2
    script = "\n".join(block.text for block in REQUESTS).replace("http://localhost:8000", server)
    script = f'set -e\ncurl() {{ command curl -sS --fail-with-body "$@"; echo; }}\n{script}'
    ran = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Arr! 17 + 25 = 42 Aye, matey!" in ran.stdout
    assert "'json' added successfully" in ran.stdout and "'json' removed successfully" in ran.stdout


def test_the_pages_client_gets_its_answer(server: str):
    (block,) = CLIENTS
    assert run(block.text.replace("http://localhost:8000", server)).strip() == "6"
