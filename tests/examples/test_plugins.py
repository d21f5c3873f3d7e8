"""Plugins of every kind: written by `quire plugins new`, installed by pip without a network, run end to end by their tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main
from quire.plugins.kinds import KINDS
from quire.plugins.new import render

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
REPAIR = "write it anew: rm -r examples/plugins/KIND, quire plugins new KIND NAME --output examples/plugins/KIND"


BUILD = """
import os, sys
from setuptools import build_meta
_, wheels, *packages = sys.argv
for package in packages:
    os.chdir(package)
    build_meta.build_wheel(wheels)
"""


def install(target: Path, *packages: Path) -> None:
    """pip installs wheels that one process has built: it would start several for each package."""

    def python(*words: object) -> None:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr

    wheels = target.with_name(f"{target.name}-wheels")
    wheels.mkdir()
    python("-c", BUILD, wheels, *packages)
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    python(*pip, "--target", target, *wheels.glob("*.whl"))


def run(site: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_PL")}
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        env=kept | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run_tests(site: Path, *packages: Path) -> None:
    pytest_options = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--import-mode=importlib")
    tests = [str(package / "tests") for package in packages]
    ran = run(site, "-m", "pytest", *pytest_options, f"--rootdir={packages[0].parent}", *tests)
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of each kind, as the command writes it."""
    folder = tmp_path_factory.mktemp("packages")
    written = {kind: folder / f"quire-{KINDS[kind].example}" for kind in KINDS}
    for kind, path in written.items():
        assert main(["plugins", "new", kind, KINDS[kind].example, "--output", str(path)]) == 0
    return written


@pytest.fixture(scope="module")
def site(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all of them are installed."""
    target = tmp_path_factory.mktemp("site")
    install(target, *packages.values())
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_is_what_the_command_writes(kind: str) -> None:
    for path, text in render(KINDS[kind], KINDS[kind].example).items():
        assert (EXAMPLES / kind / path).read_text(encoding="utf-8") == text, REPAIR


def test_plugins_of_all_kinds_work_side_by_side(packages: dict[str, Path], site: Path) -> None:
    run_tests(site, *packages.values())


def test_the_command_tells_what_was_found_loaded_and_refused_and_what_was_added(site: Path) -> None:
    ran = run(site, "-m", "quire.entrypoints.cli.main", "plugins", "--json", QUIRE_PLUGINS="acorn,willow,pine")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    states = {plugin["name"]: plugin["state"] for plugin in report["plugins"]}
    loaded = {name for name, state in states.items() if state == "loaded"}
    assert loaded == {"acorn", "willow", "pine"} and set(states.values()) == {"loaded", "refused"}
    assert len(states) == len(KINDS)
    acorn = next(plugin for plugin in report["plugins"] if plugin["name"] == "acorn")
    assert acorn["package"] == "quire-acorn 0.1.0" and acorn["target"] == "quire_acorn:register"
    assert report["added"] == {
        "architecture": {"acorn (quire-acorn 0.1.0)": ["AcornForCausalLM"]},
        "scheduling policy": {"willow (quire-willow 0.1.0)": ["willow"]},
    }
    text = run(site, "-m", "quire.entrypoints.cli.main", "plugins").stdout
    assert "spruce           refused" in text and "load only if QUIRE_PLUGINS names them" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_of_any_name_works_alone(kind: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    assert main(["plugins", "new", kind, "my-thing2", "--output", str(package)]) == 0
    install(tmp_path / "site", package)
    run_tests(tmp_path / "site", package)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "modle", "x"], "kind: 'modle' is not known (did you mean 'model'?)"),
        (["new", "model", "My Model"], "name: 'My Model' is not a name"),
        (["new", "model"], "needs both"),
        (["list", "model"], "takes no further word"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["plugins", "new", "model", "acorn", "--output", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
