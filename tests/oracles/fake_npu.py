"""The made-up device of `tests/plugins/quire_fake_npu`, installed as a user installs a plugin: with pip, into its own folder."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "plugins" / "quire_fake_npu"
SOURCES = PACKAGE / "quire_fake_npu"


def install(folder: Path) -> Path:
    """The folder with the installed package: to be put on the search path. Several processes may ask for the same."""
    site = folder / "npu-site"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "npu-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not site.exists():
            source, unfinished = folder / "npu-source", folder / "npu-unfinished"
            shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
            words = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
            subprocess.run([sys.executable, *words, "--target", str(unfinished), str(source)], check=True)
            unfinished.rename(site)
    return site


def shared_folder(base: Path) -> Path:
    """A folder that all workers of one test run share. Args: `base`: pytest's own base folder."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
