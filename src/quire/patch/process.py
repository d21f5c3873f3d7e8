"""The patches of this process: applied when their targets are imported, or when the configuration says so.

What is found wrong keeps a patch out (an error in the log), or is a doubt (a warning) where the patch only wraps. With
`QUIRE_STRICT_PATCHES` it ends the start.
"""

import datetime
import hashlib
import logging
import sys
import threading
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire import envs
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.patch.declaration import Target
from quire.patch.holders import Rebound, rebind, rebind_imports
from quire.patch.hook import ImportHook
from quire.patch.plan import Found, Status, decide
from quire.patch.targets import MISSING, Place, TargetError, check_original, load, locate, make_substitute

if TYPE_CHECKING:
    from quire.config import EngineConfig

logger = init_logger(__name__)


class _Change(NamedTuple):
    """A target that was changed."""

    target: Target
    place: Place
    substitute: Any


def _above(other: _Change, removed: _Change) -> _Change:
    if other.place.value is not removed.substitute:
        return other
    return other._replace(place=other.place._replace(value=removed.place.value))


class ProcessPatches:
    """What this process has of patches.

    Args:
        found: all that are installed and may load.
        strict: whatever is wrong with one is an error.
    """

    def __init__(self, found: Iterable[Found], *, strict: bool = False) -> None:
        self.kinds: list[str] = []
        self._strict = strict
        envs.set_default(
            "QUIRE_PATCH_DATE", datetime.date.today().isoformat()
        )  # a child that starts tomorrow decides as this
        self.statuses = decide(found, version(), envs.QUIRE_PATCH_DATE)
        self._changes: dict[str, list[_Change]] = {}
        self._said: set[str] = set()
        self._config: EngineConfig | None = None
        self._lock = threading.RLock()
        self._hook = ImportHook(self._on_import)
        for status in self.statuses:
            self._report(status)

    def begin(self, kind: str) -> None:
        """This process is of a kind, or of one more."""
        with self._lock:
            if kind in self.kinds:
                return
            self.kinds.append(kind)
            for status in self._here():
                foreign = [each for each in self.kinds if each not in status.patch.processes]
                if foreign:
                    logger.warning_once(
                        "The patch %s is for the process kinds %s; this process is also %s, which gets it too",
                        status.patch.id,
                        ", ".join(status.patch.processes),
                        ", ".join(foreign),
                    )
                if not status.patch.condition:
                    self._begin_patch(status)
                elif self._config is not None:
                    self._settle_patch(status, self._config)

    def settle(self, config: "EngineConfig | None") -> None:
        """The configuration is known: patches with a condition are applied, or are off."""
        with self._lock:
            self._config = config
            for status in [each for each in self.statuses if each.patch.condition and each.is_wanted]:
                self._settle_patch(status, config)
            self._log()

    def _settle_patch(self, status: Status, config: "EngineConfig | None") -> None:
        try:
            is_on = bool(load(status.patch.condition)(config))
        except Exception as error:
            status.find(f"{status.patch.condition} failed: {type(error).__name__}: {error}", True)
            status.is_planned = False
            self._report(status)
            return
        if not is_on and status.state == "applied":
            logger.warning("The patch %s is applied for another engine of this process", status.patch.id)
        elif not is_on:
            status.state, status.why = "off", f"{status.patch.condition} says that it is not for this engine"
            status.is_planned = False
        elif self._is_here(status):
            self._begin_patch(status)

    # What this process is, for others.

    def marks(self) -> list[str]:
        """The patches that are for this installation and engine, whatever the process: equal in all processes of an engine."""
        return [status.mark for status in self.statuses if status.is_planned]

    def describe(self) -> list[dict[str, Any]]:
        """Each patch with what has become of it, as plain values."""
        return [
            {
                "id": status.patch.id,
                "package": status.package,
                "state": status.state if self._is_here(status) or not status.is_wanted else "off",
                "why": status.why
                or ("" if self._is_here(status) else f"not for this process ({', '.join(self.kinds)})"),
                "doubts": list(status.doubts),
                "late": list(status.late),
            }
            for status in self.statuses
        ]

    def substitutes(self, path: str) -> list[Any]:
        """What was put under a name, the last one last."""
        return [change.substitute for change in self._all_changes() if change.target.path == path]

    def remove(self, patch_id: str) -> None:
        """Take a patch out of this process, as if it had never been in it.

        Raises:
            ConfigError: there is no such patch.
        """
        with self._lock:
            self._take_out(self._named(patch_id))
            self._named(patch_id).state = "off"

    def close(self) -> None:
        """Take all of them out, the last one first."""
        for status in reversed(self.statuses):
            self._take_out(status)
        self._hook.remove()

    def _named(self, patch_id: str) -> Status:
        for status in self.statuses:
            if status.patch.id == patch_id:
                return status
        raise ConfigError.of("patch", f"{patch_id!r} is not installed; there are {[s.patch.id for s in self.statuses]}")

    def _is_here(self, status: Status) -> bool:
        return bool(set(self.kinds) & set(status.patch.processes))

    def _here(self) -> list[Status]:
        return [status for status in self.statuses if status.is_wanted and self._is_here(status)]

    # Applying.

    def _begin_patch(self, status: Status) -> None:
        for target in status.patch.targets:
            if status.is_wanted:
                self._hook.watch(target.module)
                module = sys.modules.get(target.module)
                if module is not None:
                    self._apply(status, target, is_late=True)

    def _on_import(self, module: types.ModuleType) -> None:
        with self._lock:
            for status in self._here():
                if status.patch.condition and self._config is None:
                    continue
                for target in status.patch.targets:
                    if target.module == module.__name__ and status.is_wanted:
                        self._apply(status, target, is_late=False)

    def _apply(self, status: Status, target: Target, *, is_late: bool) -> None:
        try:
            place = locate(target.path)
            if self._is_applied(status, target, place):
                return
            problem = check_original(target, self._original(place))
            if problem is not None and (target.is_strict or place.value is MISSING):
                raise TargetError(problem)
            change = _Change(target, place, make_substitute(target, place))
        except TargetError as error:
            status.find(str(error), target.is_strict)
            if target.is_strict:
                self._take_out(status)  # no half of a patch stays
            self._report(status)
            return
        if problem is not None:
            status.find(problem, False)
        self._put(status, change, is_late)
        self._report(status)

    def _put(self, status: Status, change: _Change, is_late: bool) -> None:
        path, place = change.target.path, change.place
        self._changes.setdefault(status.patch.id, []).append(change)
        status.state = "applied"
        place.put(change.substitute)
        rebound = self._rebind(change, place.value, change.substitute)
        if is_late:
            status.late.append(f"{path} (also in {', '.join(rebound.reached) or 'no other place'})")
        if rebound.left:
            status.find(f"{path} is still held by {', '.join(rebound.left)}", False)

    def _is_applied(self, status: Status, target: Target, place: Place) -> bool:
        """Whether this was done, and the module was not read again since."""
        own = [change for change in self._changes.get(status.patch.id, []) if change.target is target]
        substitutes = [change.substitute for change in self._all_changes()]
        return any(change.place.owner is place.owner for change in own) and any(
            place.value is each for each in substitutes
        )

    def _original(self, place: Place) -> Any:
        """What the name had before any patch: the signature that counts, also for the second patch on a name."""
        value = place.value
        for change in reversed(self._all_changes()):
            if change.substitute is value:
                value = change.place.value
        return value

    def _all_changes(self) -> list[_Change]:
        return [change for changes in self._changes.values() for change in changes]

    def _rebind(self, change: _Change, old: Any, new: Any) -> Rebound:
        target = change.target
        if old is MISSING or new is MISSING:
            return Rebound((), ())
        if target.kind == "constant":
            return rebind_imports(target.module, change.place.name, old, new)
        spared = [change.place, change, *self._all_changes(), *(each.place for each in self._all_changes())]
        return rebind(old, new, spared, home=target.by.partition(":")[0])

    def _take_out(self, status: Status) -> None:
        for change in reversed(self._changes.pop(status.patch.id, [])):
            owner: Any = change.place.owner
            if owner.__dict__.get(change.place.name) is change.substitute:
                change.place.put(change.place.value)
            self._rebind(change, change.substitute, change.place.value)
            for changes in self._changes.values():  # what was put over it is over what was under it now
                changes[:] = [_above(other, change) for other in changes]

    # Telling.

    def _report(self, status: Status) -> None:
        """Say what is wrong, once; raise it where that is asked for."""
        refusal = [f"refused: {status.why}"] if status.state == "refused" else []
        for text in [*refusal, *status.doubts]:
            text = f"The patch {status.patch.id} ({status.package or 'of no package'}): {text}"
            if self._strict:
                raise ConfigError(text, setting="QUIRE_STRICT_PATCHES")
            if text not in self._said:
                self._said.add(text)
                logger.log(logging.ERROR if refusal else logging.WARNING, "%s", text)

    def _log(self) -> None:
        """One line for this process."""
        names = [status.patch.id for status in self._here()]
        late = [status.patch.id for status in self._here() if status.late]
        others = [f"{status.patch.id} ({status.why})" for status in self.statuses if not status.is_wanted]
        logger.info(
            "Patches of this process (%s): %s%s; %s in all, digest %s%s",
            ", ".join(self.kinds),
            ", ".join(names) or "none",
            f" (late: {', '.join(late)})" if late else "",
            len(self.marks()),
            digest_of(self.marks()),
            f"; not applied: {'; '.join(others)}" if others else "",
        )


def version() -> str:
    """The version of Quire that patches are compared with."""
    from quire.version import __version__

    return envs.QUIRE_VERSION or __version__


def digest_of(marks: Sequence[str]) -> str:
    """Eight digits that stand for a set of patches."""
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()[:8]
