"""Where compiled kernels and lists of them are kept, and what they were made with.

Knows folders and files; imports neither torch nor Triton, so that a start may look before it imports them.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import envs
from quire.kept_files import write_whole
from quire.logger import init_logger
from quire.version import __version__

logger = init_logger(__name__)

Variant = dict[str, Any]
"""A kernel in one compiled form: `kernel` (module:name), `types` and `constants` by parameter, `aligned` (which parameters
are multiples of 16), `options`. JSON values only; see `variants`."""

PACKAGES: tuple[str, ...] = ("quire.", "triton.")
"""A list of variants may name kernels of these packages: it is data, and data loads no other code."""

HERE = Path(__file__).parent.parent
SHIPPED = HERE / "compiled"
"""Kernels that came with the package; built by `quire compile-cache --output`."""
SHIPPED_LISTS = HERE / "lists"
_DECIDING = (
    "kernels/triton/**/*.py",
    "sample/device_*.py",
    "worker/device_*.py",
    "worker/feature_*.py",
    "worker/prompt_logprobs.py",
    "worker/step_graphs.py",
)
"""Kernels, what launches them for a request's features, and the sizes of steps."""
MAX_VARIANTS = 4096
"""Of a list; a process that uses more is not like the next."""


@functools.cache
def toolchain() -> str:
    """What decides, beside a kernel's source and its options, what it is compiled to.

    Triton hashes all of its own files for this, 400 MB of them, in every process; a release's version says as much.
    """
    try:
        return f"triton-{importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return "triton"


@functools.cache
def writable_folder() -> Path:
    """Where this process puts what it compiles: under QUIRE_CACHE_ROOT, or a temporary folder where that is not possible."""
    folder = Path(envs.QUIRE_CACHE_ROOT) / "kernels" / f"{__version__}-{toolchain()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        why = "no right to write"
    except OSError as error:
        why = str(error)
    other = Path(tempfile.mkdtemp(prefix="quire-kernels-"))
    logger.warning(
        "Compiled kernels cannot be kept in %s (%s): every start compiles them again; set QUIRE_CACHE_ROOT", folder, why
    )
    return other


def shipped_folders() -> list[Path]:
    """Where compiled kernels may lie that this process does not write to: QUIRE_KERNEL_CACHE, the package's own."""
    named = envs.QUIRE_KERNEL_CACHE
    folders = [Path(named).expanduser()] if named else []
    return [folder for folder in (*folders, SHIPPED) if folder.is_dir()]


def list_folders() -> list[Path]:
    """Where lists of variants lie, the one that is written to first."""
    return [Path(envs.QUIRE_CACHE_ROOT) / "kernels" / "lists", *(f / "lists" for f in shipped_folders()), SHIPPED_LISTS]


def find_list(name: str) -> list[Variant]:
    """The variants that starts of this name used before, from every place that knows of some."""
    return merge(*(read_list(folder / f"{name}.json") for folder in list_folders()))


def read_list(path: Path) -> list[Variant]:
    """The variants in a file; none where it is not there or is not such a file."""
    try:
        return [entry for entry in _read(path)["variants"] if isinstance(entry["kernel"], str)]
    except (KeyError, TypeError):
        return []


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_current(name: str) -> bool:
    """Whether a list of this name was made from the very kernels that are here: it then names all that a start needs."""
    return any(_read(folder / f"{name}.json").get("sources") == sources() for folder in list_folders())


@functools.cache
def sources() -> str:
    """A digest of the kernels' sources, and of what decides which of them are launched."""
    digest = hashlib.sha256(f"{__version__}|{toolchain()}".encode())
    for pattern in _DECIDING:
        for source in sorted(HERE.parent.parent.glob(pattern)):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def write_list(path: Path, variants: Sequence[Variant], *, is_current: bool = True) -> None:
    """Write a file of variants, whole or not at all.

    Args:
        is_current: these are all that a start launches with the kernels that are here.
    """
    lines = ",\n".join(json.dumps(variant) for variant in variants[:MAX_VARIANTS])
    made_from = sources() if is_current else ""
    write_whole(path, f'{{"sources": "{made_from}", "variants": [\n{lines}\n]}}\n'.encode())


def identity(variant: Variant) -> str:
    """A text that equal variants share."""
    return json.dumps(variant, sort_keys=True)


def merge(*lists: Sequence[Variant]) -> list[Variant]:
    """All of them, each once, in order."""
    merged: dict[str, Variant] = {}
    for variants in lists:
        for variant in variants:
            merged.setdefault(identity(variant), variant)
    return list(merged.values())


def stamp_name(variants: Sequence[Variant], capability: int) -> str:
    """The name of the empty file that says that a list is compiled: it depends on the list, the kernels' sources, the compiler
    and the device."""
    digest = hashlib.sha256(f"{sources()}|{capability}".encode())
    for name in sorted(map(identity, variants)):
        digest.update(name.encode())
    return f"done-{digest.hexdigest()[:24]}"


def is_compiled(variants: Sequence[Variant], capability: int) -> bool:
    """Whether all of a list lies in a cache already."""
    name = stamp_name(variants, capability)
    return any((folder / name).exists() for folder in (*shipped_folders(), writable_folder()))
