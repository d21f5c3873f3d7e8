"""Registries: what can be chosen by name, and who put it there. One mechanism for models, number formats, parsers, loaders …

A registry is a mapping from names to things. A thing may be registered by its path `module:attribute`; it is imported when it is
asked for. Two owners of one name are an error, unless the second one says that it replaces the first.
Knows names, owners and paths. Knows nothing of what the things are.
"""

import contextlib
import contextvars
import dataclasses
import importlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from quire.errors import ConfigError, did_you_mean

T = TypeVar("T")

BUILT_IN_OWNER = "quire"
PROGRAM = "the program"
"""The owner of what neither Quire nor a plugin registers: the user's own script."""

_loading: contextvars.ContextVar[str] = contextvars.ContextVar("plugin that is being loaded", default="")
_registries: dict[str, "Registry[Any]"] = {}


@dataclasses.dataclass(frozen=True)
class Entry(Generic[T]):
    """A name's thing, or the path of it, and who registered it."""

    name: str
    target: T | str
    owner: str

    def load(self, kind: str, setting: str) -> T:
        """The thing.

        Raises:
            ConfigError: the path does not lead to it.
        """
        if not isinstance(self.target, str):
            return self.target
        try:
            return cast(T, import_path(self.target))
        except (ImportError, AttributeError, ValueError) as error:
            message = (
                f"{kind} {self.name!r} was registered by {self.owner!r} as {self.target!r}, which cannot be imported: "
                f"{error}. The form is 'module:attribute'"
            )
            raise ConfigError(message, setting=setting) from error


class Registry(Mapping[str, T]):
    """Things of one kind by name.

    Args:
        kind: what one of them is, for messages: "tool format".
        setting: the setting that chooses one.
        built_in: Quire's own, or their paths.
    """

    def __init__(self, kind: str, setting: str, built_in: Mapping[str, T | str] | None = None) -> None:
        self.kind, self.setting = kind, setting
        self._entries = {name: Entry(name, target, BUILT_IN_OWNER) for name, target in (built_in or {}).items()}
        _registries[kind] = self

    def register(self, name: str, target: T | str, *, override: bool = False, owner: str | None = None) -> None:
        """Add a thing.

        Args:
            target: the thing, or its path `module:attribute`, which is imported on first use.
            override: replace what has the name already.
            owner: who registers, for messages; None: the plugin that is being loaded, else the program. A plugin may register
                its own things again: it is called once for each kind of process, and a process may be of several kinds.

        Raises:
            ConfigError: the name is taken.
        """
        owner = owner or current_owner()
        existing = self._entries.get(name)
        is_again = existing is not None and existing.owner == owner == _loading.get()
        if existing is not None and not override and not is_again:
            raise ConfigError(
                f"{self.kind} {name!r} is already registered by {existing.owner!r}; {owner!r} must pass override=True to "
                f"replace it",
                setting=self.setting,
            )
        self._entries[name] = Entry(name, target, owner)

    def unregister(self, name: str) -> None:
        """Take a name away; one that is not there is ignored."""
        self._entries.pop(name, None)

    def entry(self, name: str) -> Entry[T]:
        """A name's entry.

        Raises:
            ConfigError: there is none; names those that exist.
        """
        if name not in self._entries:
            known = sorted(self._entries)
            message = f"{self.setting}={name!r} is not known{did_you_mean(name, known)}; allowed: {', '.join(known)}"
            raise ConfigError(message, setting=self.setting)
        return self._entries[name]

    def find_class(self, name: str, base: type[Any]) -> Any:
        """The class of a name, or of a class path. Raises ConfigError: there is none, or it is no subclass of `base`."""
        is_path = ":" in name and name not in self
        return import_class(name if is_path else self.entry(name).target, self.setting, base)

    def __getitem__(self, name: str) -> T:
        return self._entries[name].load(self.kind, self.setting)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return self is other  # a mapping's own would import every path

    def __hash__(self) -> int:
        return id(self)

    def added(self) -> list[str]:
        """The names that others than Quire registered."""
        return [entry.name for entry in self._entries.values() if entry.owner != BUILT_IN_OWNER]

    def owned(self) -> dict[str, list[str]]:
        """The names that others than Quire registered, by their owners."""
        names: dict[str, list[str]] = {}
        for name in self.added():
            names.setdefault(self._entries[name].owner, []).append(name)
        return names


def import_path(path: str) -> Any:
    """What `module:attribute` or `module.attribute` names.

    Raises:
        ImportError, AttributeError, ValueError: it cannot be imported.
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def import_class(given: Any, setting: str, base: type[Any] = object, what: str = "") -> Any:
    """A class, by itself or by its path `module:Class` or `module.Class`.

    Args:
        setting: which is to blame. what: who names the class, for the message, if not the setting.

    Raises:
        ConfigError: the path cannot be imported, or leads to no subclass of `base`.
    """
    what = what or setting
    try:
        found = import_path(given) if isinstance(given, str) else given
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{what}={given!r} cannot be imported: {error} (the form is module:Class)", setting=setting
        ) from error
    if isinstance(found, type) and issubclass(found, base):
        return found
    message = f"{what}={given!r} is {found!r}, which is not a subclass of {base.__module__}.{base.__qualname__}"
    raise ConfigError(message, setting=setting)


def registries() -> list[Registry[Any]]:
    """Every registry that this process has imported."""
    return list(_registries.values())


def current_owner() -> str:
    """Who registers at the moment: a plugin, while it is being loaded, else the program."""
    return _loading.get() or PROGRAM


@contextlib.contextmanager
def owned_by(owner: str) -> Generator[None]:
    """Within this, what is registered belongs to `owner`."""
    token = _loading.set(owner)
    try:
        yield
    finally:
        _loading.reset(token)
