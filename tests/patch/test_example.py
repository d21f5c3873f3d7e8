"""The example package with a platform patch and a worker patch, installed with pip: seen in the right processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugins" / "patches"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH into which pip has installed the example."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "patches")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder), str(source)], check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def run(installed: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(ROOT / "src"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "QUIRE_PATCH_DATE": "2026-12-01"} | environment
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=280, cwd=ROOT)


def engine(
    installed: Path, llama: Path, ranks: int, backend: str = "", **environment: str
) -> tuple[dict[str, Any], str]:
    done = run(installed, "-m", "tests.patch.engine_script", str(llama), str(ranks), backend, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = next(
        line for line in reversed(done.stdout.splitlines()) if line.startswith("{")
    )  # Ray may say goodbye after it
    return json.loads(told), done.stdout


def test_each_patch_passes_the_tests_that_are_made_from_its_declaration(installed: Path) -> None:
    done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(EXAMPLE / "tests"))
    assert done.returncode == 0 and "16 passed" in done.stdout, done.stdout + done.stderr


def test_the_platform_patch_is_in_every_process_and_the_worker_patch_in_the_workers(
    installed: Path, llama: Path
) -> None:
    found, log = engine(installed, llama, 2, QUIRE_ENABLE_MULTIPROCESSING="1")
    assert found["size"] == 1024  # the platform patch, in the frontend
    assert found["steps"][0] == found["steps"][1] >= 4 and not found["own"]
    lines = [line for line in log.splitlines() if "Patches of this process" in line]
    both = {kind: [line for line in lines if f"({kind})" in line] for kind in ("frontend", "core", "worker")}
    assert [len(of_kind) for of_kind in both.values()] == [1, 1, 2]
    assert all("example-small-steps" in line and f"digest {found['here']['digest']}" in line for line in lines)
    assert [line for line in lines if "example-step-count" in line.split("; ")[0]] == both["worker"]
    assert "(late:" not in log


@pytest.mark.exhaustive
def test_ranks_that_are_actors_of_ray_have_the_patches_of_workers(installed: Path, llama: Path) -> None:
    pytest.importorskip("ray")
    # Where the engine is, there is Ray: its own processes inherit the way to the packages.
    found, log = engine(installed, llama, 2, "ray", PYTHONPATH=os.pathsep.join([str(installed), *sys.path]))
    assert found["steps"][0] == found["steps"][1] >= 4 and not found["own"]
    assert "(late:" not in log


def test_a_worker_in_its_engines_process_makes_the_union_and_says_so(installed: Path, llama: Path) -> None:
    found, log = engine(installed, llama, 1, QUIRE_ENABLE_MULTIPROCESSING="0")
    assert found["steps"][0] >= 4 and found["own"]
    assert "example-step-count is for the process kinds worker; this process is also frontend, core" in log
    assert {each["state"] for each in found["here"]["patches"]} == {"applied"}


COMMANDS = """
import contextlib, io, json, os, sys
from quire.entrypoints.cli.main import main
told = []
for environment, *words in json.loads(sys.argv[1]):
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    told.append([code, out.getvalue(), err.getvalue()])
    for name in environment:
        del os.environ[name]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def commands(installed: Path) -> Any:
    """Runs `quire` several times in one process: each line is variables and words; gives exit code, output and errors of each."""

    def run_commands(*lines: list[Any]) -> list[list[Any]]:
        done = run(installed, "-c", COMMANDS, json.dumps(lines))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_commands


def test_the_allow_list_and_the_version_keep_patches_out(commands: Any) -> None:
    none, other = commands(
        [{"QUIRE_PLUGINS": "other"}, "patches", "list"], [{"QUIRE_VERSION": "0.3.1.dev2"}, "patches", "list"]
    )
    assert none[1].strip() == "No package declares a patch."
    assert other[1].count("off: it is for the versions >=0.1,<0.3, and this is 0.3.1.dev2") == 2


def test_the_commands_tell_what_there_is_and_check_finds_what_has_expired(commands: Any) -> None:
    of_list, of_check, late, explained, wrong = commands(
        [{}, "patches", "list", "--json"],
        [{}, "patches", "check"],
        [{"QUIRE_PATCH_DATE": "2028-01-01"}, "patches", "check", "example-step-count"],
        [{}, "patches", "explain", "example-step-count"],
        [{}, "patches", "explain", "example-step-counts"],
    )
    rows = json.loads(of_list[1])
    assert [row["id"] for row in rows] == ["example-small-steps", "example-step-count"]
    assert {row["here"] for row in rows} == {"to be applied"}
    assert of_check[0] == 0
    assert late[0] == 1 and "it expired on 2027-12-31" in late[1]
    for part in ("A worker does not tell", "wrap quire.worker.worker:Worker.execute", "worker_counts_itself", "none"):
        assert part in explained[1]
    assert wrong[0] == 2 and "did you mean 'example-step-count'" in wrong[2]


def test_a_bug_report_names_the_patches(commands: Any) -> None:
    ((_, report, _),) = commands([{}, "collect-env", "--json"])
    assert set(json.loads(report)["patches"]) == {"digest", "example-small-steps", "example-step-count"}
