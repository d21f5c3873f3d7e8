"""Which of the declared patches are for this installation, and in which order they are applied.

Decides from what patches say, the version, the day and the machine. Looks at no target: the same in every process.
"""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from quire.patch.declaration import Patch
from quire.patch.hook import module_exists
from quire.patch.targets import load

State = Literal["off", "refused", "waiting", "applied"]


class Found(NamedTuple):
    """A patch and the package (name and version) that brings it."""

    patch: Patch
    package: str = ""


@dataclasses.dataclass
class Status:
    """What becomes of a patch in this process.

    Attributes:
        state: `off`: it is not for this version, machine, engine or kind of process. `refused`: something is wrong with it.
            `waiting`: its targets, or the configuration, are not here yet. `applied`: at least one target has changed.
        why: of `off` and `refused`.
        is_planned: it is for this installation and engine. Says nothing of its targets, so that it is equal in all processes.
        doubts: what is wrong although it is applied.
        late: targets that were imported before the patch, with everybody who held them.
    """

    patch: Patch
    package: str = ""
    state: State = "waiting"
    why: str = ""
    is_planned: bool = True
    doubts: list[str] = dataclasses.field(default_factory=list[str])
    late: list[str] = dataclasses.field(default_factory=list[str])

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be applied, now or later."""
        return self.state in ("waiting", "applied")

    @property
    def mark(self) -> str:
        """What other processes compare: the id and what the patch says."""
        return f"{self.patch.id}:{self.patch.digest(self.package)}"

    def find(self, problem: str, is_strict: bool) -> None:
        """Something is wrong: refuse the patch, or note a doubt."""
        if is_strict:
            self.state, self.why = "refused", problem
        elif problem not in self.doubts:
            self.doubts.append(problem)


def decide(found: Iterable[Found], version: str, day: datetime.date) -> list[Status]:
    """The patches in the order in which they are applied, each with what is known before anything is imported."""
    statuses = [Status(patch, package) for patch, package in found]
    for status in statuses:
        _decide_alone(status, version, day)
    for status in statuses:
        twins = [other.package for other in statuses if other.patch.id == status.patch.id]
        if len(twins) > 1:
            status.find(f"{' and '.join(sorted(twins))} have a patch of this id each", True)
    ordered = _in_order(statuses)
    _find_collisions([status for status in ordered if status.is_wanted])
    for status in ordered:
        status.is_planned = status.is_wanted
    return ordered


def _decide_alone(status: Status, version: str, day: datetime.date) -> None:
    patch = status.patch
    if faults := patch.faults():
        status.find("; ".join(faults), True)
    elif not is_for_version(patch.versions, version):
        status.state, status.why = "off", f"it is for the versions {patch.versions}, and this is {version}"
    elif patch.on_platform and not _ask(status, patch.on_platform):
        status.state, status.why = "off", status.why or f"{patch.on_platform} says that it is not for this machine"
    else:
        if day > patch.expires:
            status.find(f"it expired on {patch.expires}; {patch.removal_plan}", patch.is_strict)
        for target in patch.targets:
            if not module_exists(target.module):
                status.find(f"{target.path} does not exist: there is no module {target.module}", target.is_strict)


def _ask(status: Status, path: str) -> bool:
    try:
        return bool(load(path)())
    except Exception as error:
        status.why = f"{path} failed: {type(error).__name__}: {error}"
        return False


def is_for_version(versions: str, version: str) -> bool:
    """Whether a specifier covers a version. A local part (`+cu129`) does not count; a development or pre-release version counts
    as the release that it leads to, whose code it has."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    from quire.errors import ConfigError

    try:
        parsed = Version(version)
    except InvalidVersion:
        raise ConfigError.of(
            "QUIRE_VERSION",
            f"{version!r} is not a version, so that no patch can tell whether it is for it; give one, for example 0.3.0",
        ) from None
    counted = parsed.base_version if parsed.is_prerelease else parsed.public
    return SpecifierSet(versions).contains(counted, prereleases=True)


# --- patches beside one another ---


def _in_order(statuses: Sequence[Status]) -> list[Status]:
    """By `after`, then by id. Patches in a circle are refused."""
    left = sorted(statuses, key=lambda status: status.patch.id)
    ordered: list[Status] = []
    while left:
        waiting = {status.patch.id for status in left}
        ready = [status for status in left if not waiting & set(status.patch.after)]
        if not ready:
            for status in left:
                status.find(f"it is after itself: after={', '.join(status.patch.after)}", True)
            return ordered + left
        ordered.append(ready[0])
        left.remove(ready[0])
    return ordered


def _find_collisions(wanted: Sequence[Status]) -> None:
    """Two on one name without an order, and those that say that they do not work together."""
    before = _reachable({status.patch.id: status.patch.after for status in wanted})
    for number, first in enumerate(wanted):
        for second in wanted[number + 1 :]:
            one, other = first.patch, second.patch
            if other.id in one.conflicts or one.id in other.conflicts:
                _find_both(first, second, lambda a, b: f"{a.id} does not work together with {b.id}")
            elif (path := _shared(one, other)) and one.id not in before(other.id):
                _find_both(
                    first, second, lambda a, b, path=path: f"{b.id} changes {path} too, and no `after` orders them"
                )


def _find_both(first: Status, second: Status, text: Callable[[Patch, Patch], str]) -> None:
    for a, b in ((first, second), (second, first)):
        a.find(text(a.patch, b.patch), a.patch.is_strict)


def _shared(one: Patch, other: Patch) -> str:
    """A name that both change; a class also stands for what is in it."""
    for a in one.targets:
        for b in other.targets:
            short, long = sorted((a.path, b.path), key=len)
            if short == long or long.startswith(f"{short}."):
                return short
    return ""


def _reachable(after: dict[str, tuple[str, ...]]) -> Callable[[str], set[str]]:
    def before(name: str) -> set[str]:
        direct = set(after.get(name, ()))
        return direct.union(*(before(each) for each in direct))

    return before
