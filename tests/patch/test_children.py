"""Patches in processes that start afresh: a core of Quire, an actor of Ray, a child of multiprocessing; and their handshake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patch.conftest import patch, target

from quire.engine import core_process
from quire.engine.messages import Start
from quire.errors import ConfigError
from quire.executor import wire
from quire.processes import start_child

CHILD = """
import json, sys
import quire.patch
{early}
def main(arguments):
    from lab_engine import user
    print("\\n" + json.dumps({{"values": user.use(5), **quire.patch.describe()}}))
    return 0
"""


@pytest.fixture
def install(lab: Path):
    """Installs patches as a package's entry points do, and a module `child` whose `main` tells what there is."""

    def install_these(*patches: Any, early: str = "") -> None:
        info = lab / "lab_vendor-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-vendor\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[quire.patches]\nlab = lab_vendor.declared:PATCHES\n")
        text = "import datetime\nfrom quire.patch import Patch, Target\n"
        (lab / "lab_vendor" / "declared.py").write_text(f"{text}PATCHES = {list(patches)!r}\n")
        (lab / "child.py").write_text(CHILD.format(early=early))

    return install_these


def run_child(kind: str) -> tuple[dict[str, Any], str]:
    child = start_child("child:main", kind=kind, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = child.communicate(timeout=60)[0].decode()
    assert child.returncode == 0, output
    return json.loads(output.splitlines()[-1]), output


MISSING = "0" * 12
MATRIX = {
    "as declared": (lambda: target("core:double", "replace", "triple"), {}, [15] * 6, "applied"),
    "renamed": (lambda: target("core:twice", "replace", "triple", MISSING), {}, [10] * 6, "refused"),
    "re-signed": (lambda: target("core:double", "replace", "triple", MISSING), {}, [10] * 6, "refused"),
    "re-signed, and wrapped": (lambda: target("core:double", "wrap", "more", MISSING), {}, [11] * 6, "applied"),
    "for another kind of process": (
        lambda: target("core:double", "replace", "triple"),
        {"processes": ("worker",)},
        [10] * 6,
        "off",
    ),
}


@pytest.mark.parametrize("case", MATRIX)
def test_a_spawned_core_has_applied_or_refused_a_patch_before_it_imports_anything(install, case: str) -> None:
    make, changes, values, state = MATRIX[case]
    install(patch(make(), **changes))
    found, log = run_child("core")
    assert found["values"] == values and [each["state"] for each in found["patches"]] == [state]
    assert found["patches"][0]["late"] == [] and ("ERROR" in log) == (state == "refused")


def test_a_helper_process_has_no_patches(install) -> None:
    install(patch(target("core:double", "replace", "triple")))
    found, _ = run_child("")
    assert found["values"] == [10] * 6


def test_an_actor_that_imports_before_its_first_line_is_patched_late(install) -> None:
    """What reads a class in a Ray actor imports its modules; the first line of its `__init__` is the bootstrap."""
    install(
        patch(target("core:double", "wrap", "more"), processes=("worker",)),
        early="from lab_engine import user\nquire.patch.bootstrap('worker')",
    )
    found, _ = run_child("")
    assert found["values"] == [11] * 6 and "lab_engine.user:double" in found["patches"][0]["late"][0]


ACTOR = """
import quire.patch

class Actor:
    def __init__(self):
        quire.patch.bootstrap("worker")
        from lab_engine import user
        self.values = user.use(5)

    def tell(self):
        return self.values, quire.patch.describe()["patches"]
"""


def test_a_ray_actor_has_the_patches_of_its_node(install, lab: Path) -> None:
    ray = pytest.importorskip("ray")
    install(patch(target("core:double", "wrap", "more"), processes=("worker",)))
    (lab / "lab_actor.py").write_text(ACTOR)
    import lab_actor  # pyright: ignore[reportMissingImports]

    path = os.pathsep.join([str(lab), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        values, states = ray.get(ray.remote(lab_actor.Actor).remote().tell.remote())
    finally:
        ray.shutdown()
    assert list(values) == [11] * 6 and states[0]["state"] == "applied"


def test_an_actor_sent_by_value_has_the_patches_of_its_own_process(install, lab: Path) -> None:
    """As Ray sends a class of the main script: by value, with cloudpickle, to a process that has imported nothing."""
    cloudpickle = pytest.importorskip("cloudpickle")
    install(patch(target("core:double", "wrap", "more"), processes=("worker",)))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(ACTOR, names)
    (lab / "actor.bin").write_bytes(cloudpickle.dumps(names["Actor"]))
    code = "import sys, json, cloudpickle; a = cloudpickle.load(open(sys.argv[1], 'rb'))(); print(json.dumps(a.tell()))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(lab / "actor.bin")], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    values, states = json.loads(done.stdout.splitlines()[-1])
    assert values == [11] * 6 and states[0]["state"] == "applied" and states[0]["late"] == []


def test_a_multiprocessing_child_gets_a_replacement_and_never_a_wrapper_by_the_originals_name(install) -> None:
    install(patch(target("core:double", "replace", "triple")))
    code = """
import multiprocessing
import quire.patch
if __name__ == "__main__":
    quire.patch.bootstrap("core")
    from lab_engine.core import double
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [5]))
"""
    script = Path("spawning.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    folder = next(Path(path) for path in sys.path if (Path(path) / "lab_vendor").is_dir())
    (folder / script).write_text(code)
    done = subprocess.run([sys.executable, str(folder / script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[15]", done.stderr


# --- the handshake ---


def test_a_core_with_other_patches_than_its_frontend_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(core_process, "load_general_plugins", lambda kind: None)
    monkeypatch.setattr(core_process, "config_from_plain", lambda plain: SimpleNamespace(instance_id="x"))
    inbox: Any = SimpleNamespace(receive=lambda block: [Start(config={}, patches=["a-patch:12345678"])])
    with pytest.raises(ConfigError, match="starts this core has a-patch:12345678, and this process has none"):
        core_process.start_core(inbox)


def test_a_worker_is_told_the_patches_of_its_core() -> None:
    from quire.codec import encode

    assert wire.decode_to_worker(encode(wire.Start({}, ["a:1"]))) == wire.Start({}, ["a:1"])
