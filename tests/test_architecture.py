"""The house rules that no type checker knows: floors, banned imports, who reads the environment, how long a file may be."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire.worker.components import RunnerComponents

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "quire"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600
MAX_STATEMENTS_OF_MODELS = 3600  # with towers that see and hear, and encoders beside decoders
# The last one is the kernels' build script: it runs before the package and its dependencies can be imported.
ENVIRONMENT_READERS = {PACKAGE / "envs.py", PACKAGE / "env_override.py", PACKAGE / "kernels" / "cpu" / "build.py"}
ENVIRONMENT_READERS |= {PACKAGE / "platforms" / "nvml.py"}  # CUDA_VISIBLE_DEVICES, which is CUDA's and not ours
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec"}

# What only some rooms may know of devices: everybody else asks the platform (docs/hardware-plugin.md).
DEVICE_MODULES = {f"torch.{name}" for name in ("cuda", "accelerator", "npu", "xpu", "mps", "hpu", "mlu", "musa")}
DEVICE_NAMES = {"cpu", "cuda", "npu", "xpu", "mps", "hip", "rocm", "hpu"}
PINNING = {"pin_memory", "is_pinned", "is_cuda", "is_cpu", "is_xpu", "is_mps"}
COMPONENTS = {field.name: field.default.__name__ for field in dataclasses.fields(RunnerComponents)}
ROOMS: dict[str, tuple[str, ...]] = {
    "device module": ("platforms", "kernels/triton", "distributed/nccl.py"),
    "torch.distributed": ("distributed",),
    # config/observability.py: a profiler's name, as vLLM has it. explain_platform.py: platforms without their hardware.
    "device name": (
        "platforms",
        "kernels/triton",
        "kernels/cpu",
        "attention/cpu.py",
        "distributed/nccl.py",
        "config/observability.py",
        "entrypoints/cli/explain_platform.py",
    ),
    "pinning": ("platforms", "kernels/triton", "kernels/cpu", "conformance"),
    "component": ("conformance",),
}
"""By rule, the folders and files where it does not hold."""

# A source without any of these words need not be parsed.
OF_BANNED = re.compile(rf"\b({'|'.join(BANNED_MODULES | BANNED_CALLS)}|from torch|torch\.(load|cuda|npu))\b")
OF_DEVICES = {name.removeprefix("torch.") for name in DEVICE_MODULES} | DEVICE_NAMES | PINNING
OF_DEVICES = re.compile(rf"\b({'|'.join({*OF_DEVICES, *COMPONENTS.values()})}|distributed|torch\.device)\b")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imported_modules(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def violations_of(source: str) -> set[str]:
    """Banned things that a source uses, by name."""
    if not OF_BANNED.search(source):
        return set()
    tree = ast.parse(source)
    found = {name for name in imported_modules(tree) if name.split(".")[0] in BANNED_MODULES}
    found |= {name for name in imported_modules(tree) if name.startswith(("torch.cuda", "torch.load"))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.add(node.func.id)
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.load", "torch.cuda", "torch.npu"):
            found.add(dotted(node))
    return found


def device_violations(source: str) -> set[tuple[str, str]]:
    """What a source knows of devices: (rule, what)."""
    if not OF_DEVICES.search(source):
        return set()
    tree = ast.parse(source)
    names = imported_modules(tree) | {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found: set[tuple[str, str]] = set()
    for name in names:
        parts = ".".join(name.split(".")[:2])
        if parts in DEVICE_MODULES:
            found.add(("device module", parts))
        elif parts == "torch.distributed":
            found.add((parts, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            compared += [each for side in compared for each in getattr(side, "elts", [])]
            values = {each.value for each in compared if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            found |= {("device name", f"compares with {value!r}") for value in values & DEVICE_NAMES}
        elif isinstance(node, ast.Attribute) and node.attr in PINNING:
            found.add(("pinning", f".{node.attr}"))
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            found.add(("pinning", "pin_memory="))
        elif isinstance(node, ast.Call):
            found |= _calls_of_devices(node)
    return found


def _calls_of_devices(node: ast.Call) -> set[tuple[str, str]]:
    called = dotted(node.func)
    if called.rpartition(".")[2] in COMPONENTS.values():
        return {("component", f"{called}(…)")}
    first = node.args[0] if node.args else None
    if (
        called == "torch.device"
        and isinstance(first, ast.Constant)
        and str(first.value).split(":")[0] not in ("cpu", "meta")
    ):
        return {("device name", f"torch.device({first.value!r})")}
    return set()


def is_in(path: Path, rooms: Iterable[str]) -> bool:
    return any((PACKAGE / room) in (path, *path.parents) for room in rooms)


def environment_reads(source: str) -> list[int]:
    """Lines that touch `os.environ` or `os.getenv`."""
    if "environ" not in source and "getenv" not in source:
        return []
    tree = ast.parse(source)
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv", "os.environb")
    ]
    lines += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and {a.name for a in node.names} & {"environ", "getenv"}
    ]
    return sorted(lines)


def modules_after(statement: str) -> set[str]:
    """Every module that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", {"pickle"}),
        ("from pickle import loads", {"pickle", "pickle.loads"}),
        ("import torch\ntorch.load('x')", {"torch.load"}),
        ("import torch\ntorch.cuda.synchronize()", {"torch.cuda"}),
        ("from torch.cuda import synchronize", {"torch.cuda", "torch.cuda.synchronize"}),
        ("eval('1')", {"eval"}),
        ("model.eval()", set()),
    ],
)
def test_the_check_for_banned_things_finds_them(source: str, expected: set[str]) -> None:
    assert violations_of(source) == expected


def test_no_file_uses_a_banned_import_or_call() -> None:
    rooms = {PACKAGE / "platforms", PACKAGE / "kernels" / "triton"}
    device_runtimes = {path for path in SOURCES if rooms & {*path.parents}} | {PACKAGE / "distributed" / "nccl.py"}
    wrong: dict[str, set[str]] = {}
    for path in SOURCES:
        found = violations_of(path.read_text(encoding="utf-8"))
        if path in device_runtimes:
            found = {name for name in found if not name.startswith("torch.cuda")}
        if path.name == "torch_bin_reader.py":  # with weights_only=True, and only when asked
            found -= {"torch.load"}
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.cuda.synchronize()", {("device module", "torch.cuda")}),
        ("import torch\ntorch.accelerator.current_stream()", {("device module", "torch.accelerator")}),
        ("from torch.npu import Stream", {("device module", "torch.npu")}),
        ("import torch.distributed as dist\ndist.all_reduce(x)", {("torch.distributed", "torch.distributed")}),
        ("import torch\ntorch.distributed.barrier()", {("torch.distributed", "torch.distributed")}),
        ("x.device.type != 'cpu'", {("device name", "compares with 'cpu'")}),
        ("platform.name == 'cuda'", {("device name", "compares with 'cuda'")}),
        (
            "x.device.type in ('cpu', 'npu')",
            {("device name", "compares with 'cpu'"), ("device name", "compares with 'npu'")},
        ),
        ("import torch\ntorch.device('cuda', 1)", {("device name", "torch.device('cuda')")}),
        ("import torch\ntorch.device('cuda:1')", {("device name", "torch.device('cuda:1')")}),
        ("import torch\ntorch.device('meta')", set()),
        ("import torch\ntorch.empty(3, pin_memory=True)", {("pinning", "pin_memory=")}),
        ("tensor.pin_memory()", {("pinning", ".pin_memory")}),
        ("tensor.is_cuda", {("pinning", ".is_cuda")}),
        ("Sampler(3, 5, memory)", {("component", "Sampler(…)")}),
        ("batch_state.BatchState(3, 5, 1, 1)", {("component", "batch_state.BatchState(…)")}),
        ("self._parts.sampler(3, 5, memory)", set()),
    ],
)
def test_the_check_for_knowledge_of_devices_finds_it(source: str, expected: set[tuple[str, str]]) -> None:
    assert device_violations(source) == expected


def test_only_their_rooms_know_of_devices_ranks_and_parts_of_the_runner() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if (
            found := {
                (rule, what)
                for rule, what in device_violations(path.read_text(encoding="utf-8"))
                if not is_in(path, ROOMS[rule])
            }
        )
    }
    assert wrong == {}


def test_every_room_that_may_know_of_devices_is_there_and_needs_to() -> None:
    for rule, rooms in ROOMS.items():
        for room in rooms:
            files = [path for path in SOURCES if is_in(path, [room])]
            assert any(rule == found for path in files for found, _ in device_violations(path.read_text("utf-8"))), (
                rule,
                room,
            )


def test_only_the_environment_modules_read_the_environment() -> None:
    assert environment_reads("import os\nos.environ['A']\nos.getenv('B')\n") == [2, 3]
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if path not in ENVIRONMENT_READERS and (lines := environment_reads(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_no_file_of_the_package_is_longer_than_600_lines() -> None:
    too_long = {
        str(path.relative_to(ROOT)): count
        for path in SOURCES
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert too_long == {}


def test_all_models_together_take_few_statements() -> None:
    """A model is a table: what more than one needs belongs to layers/ or to a model that others change."""
    nodes = [node for path in (PACKAGE / "models").rglob("*.py") for node in ast.walk(parse(path))]
    assert 0 < sum(isinstance(node, ast.stmt) for node in nodes) < MAX_STATEMENTS_OF_MODELS


def test_every_module_says_its_job() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if (source := path.read_text(encoding="utf-8").strip()) and not source.startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_the_floors_hold() -> None:
    """Runs the import-linter contracts of pyproject.toml."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_importing_the_package_loads_nothing_but_itself_and_the_standard_library() -> None:
    loaded = modules_after("import quire")
    ours = {name for name in loaded if name.split(".")[0] == "quire"}
    assert ours == {"quire", "quire.version", "quire.env_override"}
    heavy = {"torch", "numpy", "msgspec", "transformers", "fastapi", "pydantic", "logging", "dataclasses", "argparse"}
    assert heavy & loaded == set()


def test_help_loads_neither_torch_nor_a_server() -> None:
    loaded = modules_after("from quire.entrypoints.cli.main import main; main(['--help'])")
    assert {"torch", "numpy", "fastapi", "pydantic", "transformers", "msgspec", "zmq"} & loaded == set()
    assert {name for name in loaded if name.startswith("quire.")} <= {
        "quire.version",
        "quire.env_override",
        "quire.entrypoints",
        "quire.entrypoints.cli",
        "quire.entrypoints.cli.main",
        "quire.entrypoints.exit_codes",
    }


def test_the_server_loads_neither_fastapi_nor_pydantic() -> None:
    assert {"fastapi", "pydantic"} & modules_after("import quire.entrypoints.server.app") == set()


def test_the_floors_without_tensors_load_no_torch() -> None:
    """Importing them directly, as the frontend process does, pulls in no torch by any path."""
    statement = "import quire.engine.arg_utils, quire.outputs, quire.request, quire.sampling_params, quire.core.output"
    assert "torch" not in modules_after(statement)
