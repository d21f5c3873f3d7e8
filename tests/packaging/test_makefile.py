"""`make install` says what it does, with sizes and times, before it is silent for minutes. Nothing is downloaded: the Python that
make is given writes down how it is called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-c import torch") exit {has_torch} ;;
esac
"""
TORCH, QUIRE, AT_HAND = (
    "Installing PyTorch for CPUs (about ",
    "Installing Quire and its packages (about ",
    "Installed. To have",
)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make is installed")


class Tree:
    """A copy of the Makefile and of what it watches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        for name in ("Makefile", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, folder)
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def make(self, target: str, *, has_torch: bool = False) -> list[str]:
        """The lines that `make TARGET` prints."""
        python = self.program("given-python", PYTHON.format(calls=self.calls, has_torch=int(not has_torch)))
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "MAKEFLAGS": ""}
        ran = subprocess.run(
            ["make", "--no-print-directory", target, f"PYTHON={python}", "VENV=venv"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    def installed(self) -> list[str]:
        """What pip was asked for."""
        calls = self.calls.read_text(encoding="utf-8").splitlines()
        return [call.removeprefix("-m pip install --quiet ") for call in calls if call.startswith("-m pip install")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def said(lines: list[str], *beginnings: str) -> list[str]:
    """Which of the beginnings lines have, in the order of the lines."""
    return [beginning for line in lines for beginning in beginnings if line.startswith(beginning)]


def test_an_installation_without_a_gpu_says_what_it_downloads_and_builds(tree: Tree) -> None:
    lines = tree.make("install")
    assert said(lines, TORCH, QUIRE, AT_HAND) == [TORCH, QUIRE, AT_HAND]
    assert "building the CPU kernels (about 2 minutes)" in "\n".join(lines)
    assert lines[-1] == "Installed. To have the command quire at hand: source venv/bin/activate"
    torch, quire = tree.installed()
    assert torch.startswith("torch==") and quire == "--editable ."
    assert said(tree.make("install"), TORCH, QUIRE, AT_HAND) == []  # it is installed
    (tree.folder / "pyproject.toml").touch()
    assert said(tree.make("install"), QUIRE) == [QUIRE]


def test_torch_is_not_installed_alone_where_there_is_a_gpu_or_torch(tree: Tree) -> None:
    assert TORCH not in said(tree.make("install", has_torch=True), TORCH, QUIRE)
    shutil.rmtree(tree.folder / "venv")
    tree.program("nvidia-smi", "#!/bin/sh\nexit 0\n")
    assert said(tree.make("install"), TORCH, QUIRE) == [QUIRE]


def test_developers_get_the_packages_of_the_extra_after_quire(tree: Tree) -> None:
    assert said(tree.make("install-dev"), TORCH, QUIRE, AT_HAND) == [TORCH, QUIRE, AT_HAND]
    assert tree.installed()[-1] == "quire-llm[dev]"


def test_a_python_out_of_range_is_refused_with_the_versions(tree: Tree) -> None:
    ran = subprocess.run(["make", "install", "PYTHON="], cwd=tree.folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "Quire needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=" in ran.stderr
