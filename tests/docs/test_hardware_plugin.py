"""docs/hardware-plugin.md is enough: its plugin, written to a folder as the page says, passes `quire conformance`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, AttentionRequest
from quire.platforms.interface import Capabilities, DeviceMemory, DeviceRuntime, Platform
from quire.worker.components import RunnerComponents

PAGE = (ROOT / "docs/hardware-plugin.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's plugin is installed."""
    folder = tmp_path_factory.mktemp("slate")
    files = dict(FILE.findall(PAGE))
    assert set(files) == {"pyproject.toml", "quire_slate/__init__.py", "quire_slate/platform.py"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    points = re.search(
        r'^\[project\.entry-points\."(.*?)"\]\n(.*?)\n$', files["pyproject.toml"], re.MULTILINE | re.DOTALL
    )
    assert points is not None
    about = folder / "quire_slate-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-slate\nVersion: 0.1.0\n", encoding="utf-8")
    entry = points[2].split("\n")[0].replace('"', "")
    (about / "entry_points.txt").write_text(f"[{points[1]}]\n{entry}\n", encoding="utf-8")
    return folder


def conformance(site: Path, *words: str) -> dict[str, str]:
    """Outcomes by check."""
    report = site / "report.json"
    words = ("--platform", "slate", "--jobs", "1", "--json", str(report), *words)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.cli.main", "conformance", *words],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {each["name"]: each["outcome"] for each in json.loads(report.read_text(encoding="utf-8"))["checks"]}


def test_the_pages_plugin_passes_what_it_claims_at_first(site: Path) -> None:
    outcomes = conformance(site, "--quick", "--only", "capabilities", "device", "pages", "engine/llama")
    assert outcomes["engine/llama"] == outcomes["device/crossing"] == outcomes["capabilities/record"] == "pass"
    assert {name for name, outcome in outcomes.items() if outcome == "not claimed"} == {
        "capabilities/fp8",
        *(f"device/{name}" for name in ("bandwidth", "events", "wait", "uploads", "capture", "record", "profiler")),
    }


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_pages_plugin_passes_the_whole_suite(site: Path) -> None:
    outcomes = conformance(site)
    assert outcomes["ranks/communicator"] == outcomes["processes/core-dies"] == "pass"


@pytest.mark.parametrize(
    "interface", [Platform, DeviceMemory, DeviceRuntime, Capabilities, AttentionBackend, RunnerComponents]
)
def test_the_page_names_everything_that_a_platform_can_say(interface: type) -> None:
    own = {name for base in interface.__mro__[:-1] for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    wanted = {name for name in own if not name.startswith("_")}
    assert wanted and {name for name in wanted if not re.search(rf"\b{name}\b", PAGE)} == set()


@pytest.mark.parametrize("record", [AttentionMetadata, AttentionParams, AttentionRequest])
def test_the_page_names_everything_that_a_backend_is_told(record: type) -> None:
    told = {"decodes", "short_tokens"}  # hints for speed
    fields = set(vars(record)["__dataclass_fields__"]) - told
    assert {name for name in fields if not re.search(rf"\b{name}\b", PAGE)} == set()


def test_every_method_of_vllms_platform_has_its_row() -> None:
    table = PAGE[PAGE.index("## From vLLM's `Platform`") :]
    named = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    )
    assert {
        "get_attn_backend_cls",
        "check_and_update_config",
        "get_device_communicator_cls",
        "manual_seed_all",
    } <= named
    assert len(named) >= 75
