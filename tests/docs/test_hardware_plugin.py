"""docs/hardware-plugin.md is enough: its plugin, written to a folder as the page says, passes `quire conformance`."""

import dataclasses
import json
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tests.docs.pages import PYTHON, ROOT
from tests.docs.platform_table import with_table

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, AttentionRequest
from quire.attention.reference import ReferenceBackend
from quire.conformance.attention_checks import Run, check_mode, make_layer, make_steps
from quire.conformance.contract import NotClaimed, Subject
from quire.conformance.page_checks import LAYOUTS, check_layout
from quire.kernels.norm import ACTIVATIONS
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Capabilities, DeviceMemory, DeviceRuntime, Explained, Platform
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


def run(site: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Python where the page's plugin is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    path = os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words], env={**kept, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def conformance(site: Path, *words: str) -> dict[str, str]:
    """Outcomes by check."""
    report = site / "report.json"
    words = ("--platform", "slate", "--jobs", "1", "--json", str(report), *words)
    done = run(site, "-m", "quire.entrypoints.cli.main", "conformance", *words)
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


def test_the_pages_table_of_platforms_methods_is_that_of_the_class() -> None:
    assert with_table(PAGE) == PAGE, "python -m tests.docs.platform_table writes it"


def test_the_page_lists_the_activations_in_their_order() -> None:
    told = PAGE[PAGE.index("quire.kernels.norm.ACTIVATIONS") : PAGE.index("A kernel that lacks one")]
    assert [name for name in re.findall(r"`(\w+)`", told) if name in ACTIVATIONS] == list(ACTIVATIONS)


# --- the attention backend of the page ---


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """The page's backend, under the name of a module."""
    module = types.ModuleType("quire_slate_attention")
    text = next(block.text for block in PYTHON if "class SlateAttention(" in block.text)
    exec(compile(text, "hardware-plugin.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.SlateAttention


def aligned_to(tokens: int) -> Subject:
    """A CPU whose pages are multiples of so many tokens, with the page's backend before the reference."""

    class Slate(CpuPlatform):
        def capabilities(self) -> Capabilities:
            return dataclasses.replace(super().capabilities(), page_alignment=Explained(tokens, "as the test says"))

        def attention_backends(self) -> list[str]:
            return ["quire_slate_attention:SlateAttention", "quire.attention.reference:ReferenceBackend"]

    subject = Subject("cpu")
    subject.platform = Slate()
    return subject


@pytest.mark.parametrize("alignment", [1, 24])
@pytest.mark.parametrize("mode", ["plain", "window", "deterministic", "one-kv-head-each"])
def test_the_pages_backend_passes_the_checks_of_attention(
    backend: type[AttentionBackend], mode: str, alignment: int
) -> None:
    assert check_mode(mode, aligned_to(alignment)).startswith("slate-pages off by")


def test_a_report_names_who_refuses_and_what_was_asked(backend: type[AttentionBackend]) -> None:
    told = check_mode("soft-cap", aligned_to(24))
    assert "refused by slate-pages: it knows plain causal layers" in told
    assert "full: 4 query and 2 KV heads of 64, pages of 24 tokens in float32, soft_cap=5.0" in told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pages_backend_passes_the_checks_of_pages_of_the_platforms_size(
    backend: type[AttentionBackend], layout: str
) -> None:
    told = check_layout(LAYOUTS[layout], aligned_to(24))
    assert "reference: 24 tokens" in told.replace("slate-pages, ", "")
    assert ("refused by slate-pages" in told) == (layout == "latents")


def test_a_layout_that_nobody_serves_is_not_claimed_with_the_refusals(backend: type[AttentionBackend]) -> None:
    subject = aligned_to(1)
    subject.platform.attention_backends = lambda: ["quire_slate_attention:SlateAttention"]  # type: ignore[method-assign]
    with pytest.raises(NotClaimed, match=r"refused by slate-pages: .*mla: 1 query and 1 KV heads"):
        check_layout(LAYOUTS["latents"], subject)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [0, 32, 64])
def test_the_pages_backend_norms_and_rotates_as_the_reference(
    backend: type[AttentionBackend], rotary: int, interleaved: bool, has_norms: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = make_layer("plain", torch.float32, 16, generator)
    table = layer.rope.cos_sin.view(len(layer.rope.cos_sin), 2, -1)[..., : rotary // 2].flatten(1)
    rope = dataclasses.replace(layer.rope, cos_sin=table, rotary_dim=rotary, interleaved=interleaved)
    layer = dataclasses.replace(layer, rope=rope if rotary else None, norms=layer.norms if has_norms else [None, None])
    ours, theirs = (Run(each(), layer, torch.device("cpu"), torch.float32) for each in (backend, ReferenceBackend))
    for step in make_steps(16, generator):
        x_TC = torch.randn(step.num_tokens, 8 * 64, generator=generator)
        torch.testing.assert_close(ours.step(step, x_TC), theirs.step(step, x_TC), rtol=1e-5, atol=1e-5)


def test_the_pages_script_compares_a_device_with_the_cpu(site: Path) -> None:
    text = next(block.text for block in PYTHON if "def answers(device" in block.text)
    done = run(site, "-c", text.replace("max_tokens=24", "max_tokens=6"))
    assert done.stdout.count("6 of 6 tokens are equal") == 2, done.stdout + done.stderr


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


def test_doors_that_take_the_place_of_patches_are_there() -> None:
    table = PAGE[PAGE.index("## From a plugin that patches") : PAGE.index("## From vLLM's `Platform`")]
    paths = re.findall(r"`(quire(?:\.\w+)+)", table)
    assert len(paths) > 8
    for path in paths:
        assert pkgutil.resolve_name(path) is not None
    methods = re.findall(r"`(\w+)\(config|`(\w+)\(specs|`(\w+)\(hf_config", table)
    assert all(hasattr(Platform, name) for names in methods for name in names if name)
