"""`quire collect-env`: the machine, the installation and the settings, for a bug report. Names no secret."""

import argparse
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from quire import envs, patch, plugins
from quire.engine.arg_parser import only
from quire.entrypoints.cli.terminal import columns, show
from quire.plugins import load_general_plugins

PACKAGES = (
    *("torch", "numpy", "msgspec", "pyzmq", "safetensors", "tokenizers", "transformers", "huggingface-hub"),
    *("sentencepiece", "mistral-common", "xgrammar", "llguidance", "prometheus-client", "opentelemetry-sdk", "openai"),
    *("starlette", "uvicorn", "uvloop", "httptools", "triton", "ray", "flash-attn", "flashinfer-python"),
)
SECRETS = ("QUIRE_API_KEY",)


add_arguments = only(
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> None:
    report = collect()
    parts = ("\n".join((f"{section}:", *columns(facts))) for section, facts in report.items())
    show(report, args.json, lambda: "\n".join(parts))


def collect() -> dict[str, dict[str, Any]]:
    """Every section; one that cannot be found out says why instead of failing."""
    from quire.plugins.vendor import REPORT_SECTIONS

    load_general_plugins("inspector")
    return {
        "quire": _quire(),
        "machine": _machine(),
        "platform": _platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "plugins": _plugins(),
        "patches": _patches(),
        "environment": _environment(),
        **{title: _section(collect) for title, collect in REPORT_SECTIONS.items()},
    }


def _quire() -> dict[str, Any]:
    from quire.version import __version__

    return {"version": __version__, "python": platform.python_version(), "executable": sys.executable}


def _machine() -> dict[str, Any]:
    from quire.benchmarks.common import processor
    from quire.platforms.host import usable_cpus, usable_memory

    free, total = usable_memory()
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": f"{usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB",
        "compiler": _first_line(["c++", "--version"]),
        "nvidia_gpus": _lines(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
    }


def _lines(command: list[str]) -> list[str]:
    """What a program prints; nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _first_line(command: list[str]) -> str:
    return next(iter(_lines(command)), "none")


def _platform() -> dict[str, Any]:
    from quire.errors import QuireError
    from quire.platforms import current_platform

    try:
        found = current_platform()
        capabilities = found.capabilities()
    except (QuireError, ImportError, OSError) as error:
        return {"error": str(error)}
    facts: dict[str, Any] = {"name": found.name}
    for field in dataclasses.fields(capabilities):
        because = getattr(capabilities, field.name)
        facts[field.name] = f"{because.value}  ({because.why})"
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plugins() -> dict[str, Any]:
    return {
        f"{plugin.group} {plugin.name}": f"{plugin.point.value}  ({plugin.package or 'no package'}; {plugin.why or 'may load'})"
        for group in plugins.GROUPS
        for plugin in plugins.discover(group)
    }


def _patches() -> dict[str, Any]:
    found = patch.describe()
    lines = {each["id"]: f"{each['state']}  ({each['package']}) {each['why']}" for each in found.get("patches", ())}
    return {"digest": found["digest"], **lines} if found else {}


def _section(collect: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    try:
        return dict(collect())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _environment() -> dict[str, Any]:
    return {name: "(set)" if name in SECRETS else text for name, text in envs.relevant_environment().items()}
