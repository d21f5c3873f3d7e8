"""Plugins: which are found, in which process they load, and what a broken one may not do."""

import sys
from typing import Any

import pytest
from tests.oracles.installed_plugins import point, pretend_installed, pretend_points

from quire import plugins

CALLS: list[Any] = []


def with_kind(process_kind: str) -> None:
    CALLS.append(("kind", process_kind))


def without_argument() -> None:
    CALLS.append("plain")


def failing() -> None:
    CALLS.append("failing")
    raise RuntimeError("I am broken")


def telling_who() -> None:
    CALLS.append(plugins.current_owner())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    # Entry points import this very module, whatever name the test runner gave it.
    monkeypatch.setitem(sys.modules, "plugins_under_test", sys.modules[__name__])


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretends that entry points are installed: name to attribute of this module (or a value)."""

    def install_these(**points: str) -> None:
        values = {name: each if ":" in each else f"plugins_under_test:{each}" for name, each in points.items()}
        pretend_installed(monkeypatch, plugins.GENERAL_GROUP, values, "acme")

    return install_these


def states(group: str = plugins.GENERAL_GROUP) -> dict[str, str]:
    return {plugin.name: plugin.state for plugin in plugins.discover(group)}


def test_a_function_is_told_each_kind_of_its_process_once_and_one_without_argument_is_called_once(install) -> None:
    install(a="with_kind", b="without_argument")
    for kind in ("frontend", "core", "core", "worker", "frontend"):
        assert plugins.load_general_plugins(kind) == ("a", "b")
    assert CALLS == [("kind", "frontend"), "plain", ("kind", "core"), ("kind", "worker")]
    assert states() == {"a": "loaded", "b": "loaded"}


def test_the_allow_list_decides_who_loads(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(a="with_kind", b="without_argument")
    monkeypatch.setenv("QUIRE_PLUGINS", "b")
    assert plugins.load_general_plugins("worker") == ("b",)
    assert states() == {"a": "refused", "b": "loaded"}
    assert "QUIRE_PLUGINS=b does not name it" in plugins.discover(plugins.GENERAL_GROUP)[0].why
    assert CALLS == ["plain"]


def test_an_empty_allow_list_allows_none(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(a="with_kind")
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    assert plugins.load_general_plugins("core") == () and not CALLS


def test_a_name_in_the_allow_list_that_no_plugin_has_is_warned_of(
    install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(acorn="without_argument")
    monkeypatch.setenv("QUIRE_PLUGINS", "acron")
    assert plugins.load_general_plugins("frontend") == ()
    log = capsys.readouterr().out
    assert "WARNING" in log and "'acron'" in log and "did you mean 'acorn'" in log


@pytest.mark.parametrize("broken", ["failing", "no_such_module_here:f", "nothing"])
def test_a_broken_plugin_is_named_and_stops_nothing_else(
    install, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    install(bad=broken, good="without_argument")
    for kind in ("frontend", "core"):
        assert plugins.load_general_plugins(kind) == ("good",)
    log = capsys.readouterr().out
    assert log.count("left out") == 1 and "'bad'" in log
    assert CALLS.count("failing") <= 1 and CALLS.count("plain") == 1
    assert states() == {"bad": "failed", "good": "loaded"}
    assert plugins.discover(plugins.GENERAL_GROUP)[0].why


def test_two_packages_with_a_plugin_of_one_name_are_both_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twins = [
        point(plugins.GENERAL_GROUP, "a", "plugins_under_test:without_argument", name) for name in ("acme", "bits")
    ]
    other = point(plugins.GENERAL_GROUP, "b", "plugins_under_test:with_kind", "bits")
    pretend_points(monkeypatch, [*twins, other])
    assert plugins.load_general_plugins("core") == ("b",)
    assert CALLS == [("kind", "core")]
    assert "acme 1.0 and bits 1.0 have a plugin of this name each" in capsys.readouterr().out


def test_one_package_that_is_found_twice_is_one_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = [point(plugins.GENERAL_GROUP, "a", "plugins_under_test:without_argument", "acme") for _ in range(2)]
    pretend_points(monkeypatch, twins)
    assert plugins.load_general_plugins("core") == ("a",)
    assert CALLS == ["plain"]


def test_an_endpoint_loads_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, plugins.ENDPOINTS_GROUP, {"hello": "plugins_under_test:with_kind"})
    assert not plugins.find_plugins(plugins.ENDPOINTS_GROUP)
    monkeypatch.setenv("QUIRE_PLUGINS", "hello")
    assert list(plugins.find_plugins(plugins.ENDPOINTS_GROUP)) == ["hello"]


def test_what_a_plugin_registers_belongs_to_it(install) -> None:
    install(who="telling_who")
    plugins.load_general_plugins("frontend")
    assert CALLS == ["who (acme 1.0)"]
    assert plugins.current_owner() == "the program"
