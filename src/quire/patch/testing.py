"""Tests that every patch needs, made from its declaration: a package that brings patches imports them into its own tests.

    from quire.patch.testing import patch_cases

    @pytest.mark.parametrize("case", patch_cases("quire-example-patches"), ids=str)
    def test_patch(case):
        case.check()

Patches change modules for a whole process, so that the checks run in fresh interpreters: one where the patch is there first, one
where its targets are, and one that is started as Quire starts its processes.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import quire.patch
from quire import envs
from quire.patch.declaration import Patch, Target
from quire.patch.holders import absolute_name
from quire.patch.plan import Found, decide
from quire.patch.process import ProcessPatches, version
from quire.patch.targets import MISSING, check_original, load, locate
from quire.plugins import PATCHES_GROUP
from quire.processes import start_child

Check = Callable[[Patch], None]
_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class PatchCase:
    """One check of one patch."""

    patch_id: str
    name: str

    def __str__(self) -> str:
        return f"{self.patch_id} {self.name}"

    def check(self) -> None:
        """Raises AssertionError, with the reason, if it fails."""
        problem = _results(self.patch_id, next(run for run, checks in RUNS.items() if self.name in checks))[self.name]
        assert problem is None, f"{self}: {problem}"


def patch_cases(package: str) -> list[PatchCase]:
    """The checks of all patches of an installed package.

    Raises:
        ValueError: it declares none.
    """
    patches = [patch for patch, brought_by in quire.patch.found() if brought_by.split(" ")[0] == package]
    if not patches:
        raise ValueError(f"no patch of {package!r} is found in the entry points of the group {PATCHES_GROUP}")
    return [PatchCase(patch.id, name) for patch in patches for checks in RUNS.values() for name in checks]


@functools.cache
def _results(patch_id: str, run: str) -> dict[str, str | None]:
    """Each check of a run: what is wrong, or None."""
    kind = next(iter(_patch(patch_id).processes)) if run == "spawned" else ""
    child = start_child(f"{__name__}:main", [patch_id, run], kind=kind, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = child.communicate(timeout=_TIMEOUT_S)
    finally:
        child.kill()
    if child.returncode:
        raise AssertionError(f"{patch_id}: the process of the checks ended with {child.returncode}: {errors.decode()}")
    return json.loads(output.splitlines()[-1])


def main(arguments: list[str]) -> int:
    """The child: runs the checks of a run one after another, and prints what is wrong."""
    patch_id, run = arguments
    results: dict[str, str | None] = {}
    for name, check in RUNS[run].items():
        try:
            check(_patch(patch_id))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        else:
            results[name] = None
    print("\n" + json.dumps(results))
    return 0


def _patch(patch_id: str) -> Patch:
    return next(patch for patch, _ in quire.patch.found() if patch.id == patch_id)


# --- the checks ---


def _applied(patch: Patch) -> ProcessPatches:
    """A process of the patch's kinds with this patch (and those that must be before it), whatever the machine and the engine."""
    others = [found for found in quire.patch.found() if found.patch.id in patch.after]
    here = dataclasses.replace(patch, on_platform="", condition="")
    process = ProcessPatches([*others, Found(here)], strict=True)
    for kind in patch.processes:
        process.begin(kind)
    for target in patch.targets:
        importlib.import_module(target.module)
    return process


def _expect(is_right: bool, problem: str) -> None:
    if not is_right:
        raise AssertionError(problem)


_FIRST: dict[str, ProcessPatches] = {}
"""The process of the run in which the patch is there first."""


def _applies(patch: Patch) -> None:
    process = _FIRST[patch.id] = _applied(patch)
    state = next(each for each in process.describe() if each["id"] == patch.id)
    _expect(state["state"] == "applied" and not state["late"], f"it is {state}")
    for target in patch.targets:
        _expect(_is_changed(process, target), f"{target.path} has not changed")


def _is_changed(process: ProcessPatches, target: Target) -> bool:
    return any(load(target.path) is changed for changed in process.substitutes(target.path))


def _is_idempotent(patch: Patch) -> None:
    process = _FIRST[patch.id]
    before = {target.path: load(target.path) for target in patch.targets}
    for kind in patch.processes:
        process.begin(kind)
    importlib.invalidate_caches()
    for path, value in before.items():
        importlib.import_module(path.partition(":")[0])
        _expect(load(path) is value, f"{path} changed again")


def _reaches_every_importer(patch: Patch) -> None:
    for target, where, value in _imported(patch):
        _expect(value is load(target.path), f"{where} has another {target.path}")


def _imported(patch: Patch) -> Iterator[tuple[Target, str, Any]]:
    """What the modules that import a target from its module have of it."""
    for target in patch.targets:
        name = target.path.partition(":")[2]
        for module, local in importers(target.module, name) if "." not in name else ():
            with contextlib.suppress(ImportError):  # it needs something that is not installed
                yield target, f"{module}:{local}", vars(importlib.import_module(module)).get(local)


def importers(module: str, name: str) -> list[tuple[str, str]]:
    """The modules of the same package whose text imports a name of a module when they are imported, and what they call it."""
    top = module.partition(".")[0]
    folders = importlib.import_module(top).__path__
    found: list[tuple[str, str]] = []
    for folder in map(Path, folders):
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if name in text:
                parts = [top, *path.relative_to(folder).with_suffix("").parts]
                package = ".".join(parts[:-1])
                own = package if parts[-1] == "__init__" else ".".join(parts)
                for node in ast.parse(text).body:
                    if isinstance(node, ast.ImportFrom) and absolute_name(node, package) == module:
                        found += [(own, alias.asname or alias.name) for alias in node.names if alias.name == name]
    return found


def _leaves_the_original_alone(patch: Patch) -> None:
    for _ in _imported(patch):
        pass  # everybody is there before the patch, in this run
    before = {target.path: locate(target.path).value for target in patch.targets}
    never = f"{__name__}:never"
    for change in ({"on_platform": never}, {"condition": never}, {"versions": "<0"}):
        process = ProcessPatches([Found(dataclasses.replace(patch, **change))], strict=True)
        for kind in patch.processes:
            process.begin(kind)
        process.settle(None)
        changed = [path for path, value in before.items() if locate(path).value is not value]
        process.close()
        _expect(not changed, f"{', '.join(changed)} changed though {change} does not hold")


def never(*_: Any) -> bool:
    """A condition that does not hold."""
    return False


def _reaches_those_who_were_there(patch: Patch) -> None:
    process = _FIRST[patch.id] = _applied(patch)
    for target in patch.targets:
        _expect(_is_changed(process, target), f"{target.path} has not changed")
    _reaches_every_importer(patch)


def _can_be_removed(patch: Patch) -> None:
    _FIRST[patch.id].remove(patch.id)
    _FIRST[patch.id].close()
    for target in patch.targets:
        value = locate(target.path).value
        _expect((value is MISSING) == (target.kind == "add"), f"{target.path} is {value!r}")
        _expect(
            not _is_changed(_FIRST[patch.id], target) if value is not MISSING else True, f"{target.path} is patched"
        )
        problem = check_original(target, value)
        _expect(problem is None, problem or "")
    _reaches_every_importer(patch)


def _survives_spawn(patch: Patch) -> None:
    """In a process that Quire's way of starting one has made; its first line was the bootstrap."""
    for target in patch.targets:
        importlib.import_module(target.module)
    state = next(each for each in quire.patch.describe()["patches"] if each["id"] == patch.id)
    if patch.condition and state["state"] == "waiting":
        return  # for a configuration
    _expect(state["state"] in ("applied", "off") and not state["late"], f"it is {state}")


def _still_fits(patch: Patch) -> None:
    (status,) = decide([Found(dataclasses.replace(patch, after=(), on_platform=""))], version(), envs.QUIRE_PATCH_DATE)
    _expect(status.is_wanted and not status.doubts, "; ".join([status.why, *status.doubts]))
    _expect(not load(patch.removal_check)(), f"it can be removed: {patch.removal_plan}")


RUNS: dict[str, dict[str, Check]] = {
    "patched first": {
        "applies": _applies,
        "is idempotent": _is_idempotent,
        "reaches every importer": _reaches_every_importer,
    },
    "patched late": {
        "still fits": _still_fits,
        "leaves the original alone where it is off": _leaves_the_original_alone,
        "reaches those who were there before": _reaches_those_who_were_there,
        "can be removed": _can_be_removed,
    },
    "spawned": {"survives spawn": _survives_spawn},
}
"""The checks by the process in which they run, in this order."""
