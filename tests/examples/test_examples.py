"""Every example of `examples/` runs on the demo model and prints what its page says."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.server_process import SERVE, ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> None:
    """Call the main function of an example, in this process: torch is imported once for all of them."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(*arguments)


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a server."""
    server = ServerProcess(*SERVE, *arguments, "--port", "0", "--kv-cache-memory-bytes", "64M")
    yield f"{server.url}/v1"
    server.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of the demo model."""
    with serving("--max-model-len", "2048") as address:
        yield address


def test_offline_text(capsys: pytest.CaptureFixture[str]) -> None:
    run("offline")
    assert "What is 17 + 25? -> 17 + 25 = 42" in capsys.readouterr().out


def test_structured_output(capsys: pytest.CaptureFixture[str]) -> None:
    run("structured_output")
    assert "{'name': 'Bob', 'age': 7}; 17 + 25 = 42; Paris" in capsys.readouterr().out


def test_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    run("embeddings")
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert len(rows) == 3 and all(-1 <= float(similarity) <= 1 for similarity, _ in rows)


def test_logits_processors(capsys: pytest.CaptureFixture[str]) -> None:
    run("logits_processor")
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if ": '" in line)
    assert "42" in lines["plain"] and "42" not in lines["no digits"] and "(4 tokens)" in lines["three tokens"]


def test_a_batch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("batch", str(tmp_path))
    assert "sum -> 17 + 25 = 42" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_ray_data(capsys: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    try:
        run("ray_data")
    finally:
        ray.shutdown()  # which other tests start for themselves
    assert "What is 17 + 25? -> 17 + 25 = 42" in capsys.readouterr().out


def test_a_chat_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("chat_client", url)
    assert "Ada" in capsys.readouterr().out.splitlines()[-1]


def test_tool_calls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("tool_calls", url)
    called, answered = capsys.readouterr().out.splitlines()[-2:]
    assert called.startswith("calculate(") and called.endswith("= 84") and "84" in answered


def test_questions_about_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("quire-demo-vision") as address:
        run("image_chat", address)
    assert capsys.readouterr().out.splitlines() == [
        "How many circles are there? 3",
        "What colour is the square? It is blue.",
    ]


def test_a_sound_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("quire-demo-speech") as address:
        run("transcribe", address)
    said = capsys.readouterr().out
    assert said.startswith("40 75\n") and "00:00:00,000 -->" in said


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES.glob("*.py") if f"({path.name})" not in text]
