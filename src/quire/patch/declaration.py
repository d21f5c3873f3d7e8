"""What a patch says of itself: a plain object, which names everything by its path, so that declaring it imports nothing.

Knows no process and applies nothing.
"""

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Iterator
from typing import Literal, get_args

PatchKind = Literal["wrap", "replace", "constant", "add"]
ProcessKind = Literal["frontend", "core", "worker", "inspector"]
PATCH_KINDS: tuple[str, ...] = get_args(PatchKind)
PROCESS_KINDS: tuple[str, ...] = get_args(ProcessKind)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TEXTS = ("owner", "why", "how", "related_change", "removal_plan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One name that a patch changes. Paths are `module:qualname`, for example `quire.core.stop:find_stop`.

    Attributes:
        path: the name.
        kind: `wrap`: `by` is called with the original and then the arguments. `replace`: `by` takes the place of a function or a
            class. `constant`: what `by` names takes the place of a value. `add`: the name does not exist, and `by` is put there.
        by: path of what is put there. A function or a class must be found in its module under its own name.
        signature: the original's hash, as `quire patches explain PATH` prints it; empty for `add`.
    """

    path: str
    kind: PatchKind
    by: str
    signature: str = ""

    @property
    def module(self) -> str:
        """Where the name is."""
        return self.path.partition(":")[0]

    @property
    def is_strict(self) -> bool:
        """Whether a doubt keeps the patch out. A wrapper still calls what it finds, so that a warning is enough."""
        return self.kind != "wrap"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of Quire that a package makes from outside, because there is no other way yet.

    Attributes:
        id: lower case letters, digits, `.`, `_` and `-`.
        processes: the kinds of process that it changes: `frontend`, `core`, `worker`, `inspector`.
        versions: the versions of Quire that it is for, for example `>=0.1,<0.3`.
        why, how: the reason, and what it does.
        related_change: the issue or change of Quire that would make it needless, or why there is none.
        removal_plan: what must happen so that it can go.
        removal_check: path of a function without arguments; it returns whether that has happened. `quire patches check` calls it.
        expires: the last day on which it is applied.
        owner: who answers for it.
        on_platform: path of a function without arguments: whether this machine is one for it. It is called before Quire's
            configuration exists, and should import nothing of Quire. Empty: every machine.
        condition: path of a function that takes the `EngineConfig`: whether this engine is one for it. The patch waits for the
            configuration then. Empty: every engine.
        after: ids of patches that are applied before it, where they change the same name.
        conflicts: ids of patches with which it does not work.
    """

    id: str
    targets: tuple[Target, ...]
    processes: tuple[ProcessKind, ...]
    versions: str
    owner: str
    why: str
    how: str
    related_change: str
    removal_plan: str
    removal_check: str
    expires: datetime.date
    on_platform: str = ""
    condition: str = ""
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def is_strict(self) -> bool:
        """Whether a doubt about the whole keeps it out."""
        return any(target.is_strict for target in self.targets)

    def digest(self, package: str) -> str:
        """Eight digits that stand for everything that it says, and for the package (name and version) that brings it."""
        return hashlib.sha256(f"{package} {self!r}".encode()).hexdigest()[:8]

    def faults(self) -> list[str]:
        """What is wrong with the declaration, whatever Quire is like."""
        return list(self._faults())

    def _faults(self) -> Iterator[str]:
        if not _ID.fullmatch(self.id):
            yield f"id={self.id!r}; allowed: lower case letters, digits, '.', '_' and '-'"
        if not self.targets:
            yield "it has no targets"
        if not self.processes or set(self.processes) - set(PROCESS_KINDS):
            yield f"processes={self.processes!r}; allowed: {', '.join(PROCESS_KINDS)}"
        yield from (f"{name} is empty" for name in _TEXTS if not getattr(self, name).strip())
        for name in ("removal_check", "on_platform", "condition"):
            path = getattr(self, name)
            if not _PATH.fullmatch(path) and (path or name == "removal_check"):
                yield f"{name}={path!r} is not module:function"
        for target in self.targets:
            yield from _target_faults(target)
        if (problem := _versions_fault(self.versions)) is not None:
            yield problem


def _target_faults(target: Target) -> Iterator[str]:
    if target.kind not in PATCH_KINDS:
        yield f"kind={target.kind!r} of {target.path}; allowed: {', '.join(PATCH_KINDS)}"
    yield from (f"{path!r} is not module:name" for path in (target.path, target.by) if not _PATH.fullmatch(path))
    if not target.signature and target.kind != "add":
        yield f"{target.path} has no signature: `quire patches explain {target.path}` prints it"


def _versions_fault(versions: str) -> str | None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except InvalidSpecifier as error:
        return f"versions={versions!r}: {error}"
    return None if versions.strip() else "versions is empty; for example '>=0.1,<0.3'"
