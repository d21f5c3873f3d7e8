"""docs/lora.md is true: its scripts print what it says, and its requests are answered by the server that it starts."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, read_blocks
from tests.oracles.server_process import SERVE, ServerProcess

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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The page's own, with what its other sections turn on."""
    command = next(block.text for block in BLOCKS if block.text.startswith("quire serve --lora-modules"))
    flags = ["--port", "0", "--cpu-threads", "1", "--kv-cache-memory-bytes", "64M", "--enable-prompt-embeds"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        server = ServerProcess(*SERVE, *shlex.split(command)[2:], *flags)
    yield server
    server.kill()


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_script_prints_what_the_page_says(number: int):
    says = BLOCKS[number + 1]
    assert says.language == "text"
    lines = [line for line in run(BLOCKS[number].text).splitlines() if not re.match(r"(INFO|WARNING) ", line)]
    assert "\n".join(lines).strip() == says.text.strip()


def test_every_request_of_the_page_is_answered(server: ServerProcess, tmp_path: Path):
    assert len(REQUESTS) == 2
    script = "\n".join(block.text for block in REQUESTS).replace("http://localhost:8000", server.url)
    script = f'set -e\ncurl() {{ command curl -sS --fail-with-body "$@"; echo; }}\n{script}'
    ran = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Arr! 17 + 25 = 42 Aye, matey!" in ran.stdout
    assert "'json' added successfully" in ran.stdout and "'json' removed successfully" in ran.stdout


def test_the_pages_client_gets_its_answer(server: ServerProcess):
    (block,) = CLIENTS
    assert run(block.text.replace("http://localhost:8000", server.url)).strip() == "6"
