"""Plugins: which are found, in which process they load, and what a broken one may not do."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from quire import plugins

CALLS: list[Any] = []


def with_kind(process_kind: str) -> None:
    CALLS.append(("kind", process_kind))


def without_argument() -> None:
    CALLS.append("plain")


def failing() -> None:
    raise RuntimeError("I am broken")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    plugins.load_general_plugins.cache_clear()
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretends that entry points are installed: name to value."""

    def install_these(**points: str) -> None:
        def entry_points(*, group: str) -> list[EntryPoint]:
            return [EntryPoint(name, value, group) for name, value in points.items() if group == plugins.GENERAL_GROUP]

        monkeypatch.setattr(plugins, "entry_points", entry_points)

    return install_these


HERE = __name__


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points import this very module, whatever name the test runner gave it."""
    import sys

    monkeypatch.setitem(sys.modules, "plugins_under_test", sys.modules[HERE])


def test_each_plugin_is_called_once_and_told_the_process_kind(install) -> None:
    install(a="plugins_under_test:with_kind", b="plugins_under_test:without_argument")
    assert plugins.load_general_plugins("core") == ("a", "b")
    assert plugins.load_general_plugins("core") == ("a", "b")
    assert CALLS == [("kind", "core"), "plain"]


def test_the_allow_list_decides_who_loads(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(a="plugins_under_test:with_kind", b="plugins_under_test:without_argument")
    monkeypatch.setenv("QUIRE_PLUGINS", "b,unknown")
    assert plugins.load_general_plugins("worker") == ("b",)
    plugins.load_general_plugins.cache_clear()
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    assert plugins.load_general_plugins("worker") == ()
    assert CALLS == ["plain"]


@pytest.mark.parametrize(
    "broken", ["plugins_under_test:failing", "no_such_module_here:f", "plugins_under_test:nothing"]
)
def test_a_broken_plugin_is_named_and_stops_nothing_else(
    install, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    install(bad=broken, good="plugins_under_test:without_argument")
    assert plugins.load_general_plugins("frontend") == ("good",)
    assert CALLS == ["plain"]
    log = capsys.readouterr().out
    assert "ERROR" in log and "'bad'" in log
