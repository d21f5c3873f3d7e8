"""Every kind of process loads the plugins, each told what it is; and every kind can be traced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import os

def register(process_kind):
    with open(os.environ["ROLES_FILE"], "a") as file:
        file.write(f"{os.getpid()} {process_kind}\\n")
"""
RUN = """
import sys
from quire import LLM, SamplingParams
if __name__ == "__main__":
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": sys.argv[1], "recovery": True}
    llm = LLM(max_model_len=256, kv_cache_memory_bytes=1 << 24, **settings)
    print(llm.generate("a", SamplingParams(max_tokens=2))[0].finished)
"""


@pytest.mark.parametrize("backend", ["mp", pytest.param("ray", marks=pytest.mark.exhaustive)])
def test_frontend_core_and_each_worker_load_plugins_and_are_told_what_they_are(backend: str, tmp_path: Path) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    (tmp_path / "roles_plugin.py").write_text(PLUGIN)
    (tmp_path / "run.py").write_text(RUN)
    metadata = tmp_path / "roles-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: roles\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[quire.general_plugins]\nroles = roles_plugin:register\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "ROLES_FILE": str(tmp_path / "roles")}
    environment.pop("QUIRE_PLUGINS", None)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), backend],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in (tmp_path / "roles").read_text().splitlines()]
    assert sorted(kind for _, kind in lines) == ["core", "frontend", "worker", "worker"]
    assert len({pid for pid, _ in lines}) == 4
