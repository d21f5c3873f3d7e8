"""Kernels in the form that a GPU gets, which no test here runs: at least every module of them can be imported."""

import subprocess
import sys
from pathlib import Path

import quire.kernels.triton

IMPORT_ALL = """
import importlib, pkgutil, sys
import quire.kernels.triton
for module in pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
    print(module.name)
"""


def test_every_module_of_triton_kernels_can_be_imported_without_the_interpreter():
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    folder = Path(quire.kernels.triton.__file__).parent
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    assert len(done.stdout.split()) >= len(files)
