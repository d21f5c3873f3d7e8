"""The source distribution is complete, and the wheel works alone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_ON_CPU = re.search(r"^TORCH_ON_CPU := (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def run(*words: str | Path, folder: Path) -> str:
    """The output of a command that must succeed, without the variables that show it this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=kept, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the project."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the list of the project's files is not known")
    return run("git", "ls-files", folder=ROOT).splitlines()


@pytest.fixture(scope="module")
def tree(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("tree")
    for name in filter(lambda name: (ROOT / name).exists(), tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def test_the_source_distribution_holds_every_file_of_the_project(
    tree: Path, tracked: list[str], tmp_path: Path
) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tree, folder=tree)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    assert not sorted(set(tracked) - held)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_built_wheel_generates_text_in_an_empty_environment(tree: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree, folder=tree)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"quire_llm-[\w.]+-py3-none-linux_\w+\.whl", wheel.name)
    run(sys.executable, "-m", "venv", tmp_path / "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    if not os.path.exists("/dev/nvidiactl"):
        assert TORCH_ON_CPU is not None
        run(python, "-m", "pip", "install", "--quiet", TORCH_ON_CPU[1], folder=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", wheel, folder=tmp_path)
    told = run(python, ROOT / "tests" / "packaging" / "generate.py", folder=tmp_path)
    assert str(tmp_path / "empty") in told and "17 + 25 = 42" in told
