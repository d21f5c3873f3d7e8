"""Entry points that seem to be installed, and registries as they were before."""

from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest

from quire.plugins import discovery
from quire.plugins.registry import Registry


def pretend_installed(monkeypatch: pytest.MonkeyPatch, group: str, points: dict[str, str], package: str = "") -> None:
    """Have these entry points (name to value) of one group be all that are found."""
    pretend_points(monkeypatch, [point(group, name, value, package) for name, value in points.items()])


def pretend_points(monkeypatch: pytest.MonkeyPatch, points: list[EntryPoint]) -> None:
    """Have these be all that are found, and nothing be loaded; afterwards nothing is remembered."""
    for name in ("_plugins", "_called"):
        monkeypatch.setattr(discovery, name, {})
    monkeypatch.setattr(discovery, "_points", lambda group: tuple(each for each in points if each.group == group))


def point(group: str, name: str, value: str, package: str = "") -> EntryPoint:
    """An entry point of a package that seems to be installed."""
    found = EntryPoint(name, value, group)
    if package:
        vars(found)["dist"] = _Package(package)
    return found


class _Package(PathDistribution):
    def __init__(self, name: str) -> None:
        super().__init__(Path(name))
        self._called = name

    @property
    def metadata(self) -> Any:
        return {"Name": self._called, "Version": "1.0"}

    @property
    def version(self) -> str:
        return "1.0"


def restore(monkeypatch: pytest.MonkeyPatch, *registries: Registry[Any]) -> None:
    """What the test registers is gone afterwards."""
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
