"""The installation that README.md describes, in two ways: this environment with the developers' packages hidden, which is fast;
and a virtual environment that `make install` fills in a copy of the tree, which takes minutes and needs the network."""

import dataclasses
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.docs.pages import DEMO_SERVER, ROOT
from tests.oracles.server_process import held_port

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def core_packages() -> frozenset[str]:
    """The distributions that the dependencies of the core bring here, all of them."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in DECLARED["dependencies"]]
    while waiting:
        wanted, extra = waiting.pop()
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if not applies or plain(wanted.name) in found:
            continue
        found.add(plain(wanted.name))
        asked = [Requirement(text) for text in importlib.metadata.requires(wanted.name) or ()]
        waiting += [(each, extra) for each in asked for extra in ("", *wanted.extras)]
    return frozenset(found)


@functools.cache
def core_modules() -> frozenset[str]:
    """The top-level modules of those distributions, and `quire`."""
    owners = importlib.metadata.packages_distributions()
    found = {module for module, names in owners.items() if any(plain(name) in core_packages() for name in names)}
    return frozenset(found | {"quire"})


@dataclasses.dataclass
class Installation:
    """Where commands run as after the installation of the README.

    Attributes:
        folder: where files of commands go; the folder of the first command is not the project's.
    """

    python: Path
    environment: dict[str, str]
    folder: Path

    def run(self, *words: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run a command with `quire` and `python` on the path."""
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )


def _installation(python: Path, folder: Path, **environment: str) -> Installation:
    """Make an installation whose path begins with commands that start this interpreter."""
    commands = folder / "bin"
    commands.mkdir()
    for name, module in (("quire", " -m quire.entrypoints.cli.main"), ("python", ""), ("pip", " -m pip")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{python}"{module} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "PYTHON", "VIRTUAL_ENV"))
    }
    work = folder / "work"
    work.mkdir()
    path = f"{commands}:{os.environ['PATH']}"
    return Installation(python, {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", **environment}, work)


@pytest.fixture(scope="session")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """This environment, in which only the core's packages can be imported."""
    sources = [str(Path(__file__).parent / "core_only"), str(ROOT / "src")]
    return _installation(
        Path(sys.executable),
        tmp_path_factory.mktemp("hidden"),
        PYTHONPATH=os.pathsep.join(sources),
        CORE_MODULES=" ".join(core_modules()),
        CORE_PACKAGES=" ".join((*core_packages(), "quire", "quire-llm")),
    )


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The result of `make install` in a copy of the tree; README_INSTALLATION names an existing one."""
    folder = tmp_path_factory.mktemp("fresh")
    tree = Path(os.environ.get("README_INSTALLATION") or folder / "quire")
    if not tree.exists():
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        made = subprocess.run(["make", "install"], cwd=tree, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
    return _installation(tree / ".venv/bin/python", folder)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("hidden", id="core packages"),
        pytest.param("fresh", id="README's installation", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]),
    ],
)
def installation(request: pytest.FixtureRequest) -> Installation:
    """Each of the two installations."""
    return request.getfixturevalue(request.param)


@dataclasses.dataclass
class DemoServer:
    """`quire serve`, started in an installation.

    Attributes:
        url: its address.
        said: what it printed until it was ready.
    """

    installation: Installation
    url: str
    said: str

    def at_hand(self, text: str) -> str:
        """Return a page's text with this server's address instead of the documented one."""
        return DEMO_SERVER.sub(self.url, text)


@pytest.fixture(scope="session")
def server(installation: Installation) -> Iterator[DemoServer]:
    """A server of the demo model."""
    with held_port() as port:
        yield from _serve(installation, port)


def _serve(installation: Installation, port: int) -> Iterator[DemoServer]:
    log = installation.folder / "server.log"
    # An unknown field of a documented request is a fault of the page.
    command = [
        "quire",
        "serve",
        "--port",
        str(port),
        "--strict",
        "--kv-cache-memory-bytes",
        "64M",
        "--max-model-len",
        "2048",
    ]
    command += [
        "--profiler-config",
        '{"profiler": "torch", "torch_profiler_dir": "profiles"}',
        "--batch-store",
        "batches",
    ]
    environment = installation.environment | {"QUIRE_SERVER_DEV_MODE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=installation.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url + "/ready"):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        while "Try it:" not in log.read_text():
            time.sleep(0.05)
        yield DemoServer(installation, url, log.read_text())
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False
