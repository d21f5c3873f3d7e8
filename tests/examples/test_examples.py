"""Every example of `examples/` runs on the demo model and prints what its page says."""

import importlib.util
import os
import subprocess
import sys
import tomllib
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


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of the demo model."""
    server = ServerProcess(*SERVE, "--port", "0", "--kv-cache-memory-bytes", "64M", "--max-model-len", "2048")
    yield f"{server.url}/v1"
    server.kill()


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


def test_a_chat_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("chat_client", url)
    assert "Ada" in capsys.readouterr().out.splitlines()[-1]


def test_tool_calls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("tool_calls", url)
    called, answered = capsys.readouterr().out.splitlines()[-2:]
    assert called.startswith("calculate(") and called.endswith("= 84") and "84" in answered


_USE_PLUGIN = """
from quire import LLM, SamplingParams
from quire.parsers.formats import TOOLS
llm = LLM(hf_overrides={"architectures": ["AcornForCausalLM"]}, max_model_len=512)
answer = llm.chat([{"role": "user", "content": "What is 17 + 25?"}], SamplingParams(temperature=0, max_tokens=20))
print("acorn" in TOOLS, answer[0].outputs[0].text)
"""


def test_a_plugin_that_is_installed_adds_a_model_and_a_format(tmp_path: Path) -> None:
    """The metadata that pip would write, beside the package."""
    declared = tomllib.loads((EXAMPLES / "plugin" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / f"{declared['name'].replace('-', '_')}-{declared['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {declared['name']}\nVersion: {declared['version']}\n", encoding="utf-8")
    groups = [
        "\n".join((f"[{group}]", *(f"{name} = {path}" for name, path in points.items())))
        for group, points in declared["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    paths = [str(tmp_path), str(EXAMPLES / "plugin" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-c", _USE_PLUGIN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "True 17 + 25 = 42" in ran.stdout


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES.glob("*.py") if f"({path.name})" not in text]
