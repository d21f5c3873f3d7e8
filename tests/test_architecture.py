"""The house rules that no type checker knows: floors, banned imports, who reads the environment, how long a file may be."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "quire"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600
MAX_LINES_OF_MODELS = 6000
# The last one is the kernels' build script: it runs before the package and its dependencies can be imported.
ENVIRONMENT_READERS = {PACKAGE / "envs.py", PACKAGE / "env_override.py", PACKAGE / "kernels" / "cpu" / "build.py"}
ENVIRONMENT_READERS |= {PACKAGE / "platforms" / "nvml.py"}  # CUDA_VISIBLE_DEVICES, which is CUDA's and not ours
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec"}


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
    tree = ast.parse(source)
    found = {name for name in imported_modules(tree) if name.split(".")[0] in BANNED_MODULES}
    found |= {name for name in imported_modules(tree) if name.startswith(("torch.cuda", "torch.load"))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.add(node.func.id)
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.load", "torch.cuda", "torch.npu"):
            found.add(dotted(node))
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch `os.environ` or `os.getenv`."""
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


def test_all_models_together_take_less_than_6000_lines() -> None:
    """A model is a table: what more than one needs belongs to layers/ or to a model that others change."""
    models = (PACKAGE / "models").rglob("*.py")
    assert 0 < sum(len(path.read_text(encoding="utf-8").splitlines()) for path in models) < MAX_LINES_OF_MODELS


def test_every_module_says_its_job() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(parse(path))
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
