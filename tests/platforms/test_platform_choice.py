"""Which platform a process runs on: plugins, built-in ones, and the variable that decides between them."""

import sys
from types import ModuleType

import pytest
from tests.oracles.installed_plugins import pretend_installed

from quire import platforms, plugins
from quire.errors import ConfigError
from quire.platforms import current_platform
from quire.platforms.cpu import CpuPlatform


class FirstPlatform(CpuPlatform):
    name = "first"


class SecondPlatform(CpuPlatform):
    name = "second"


def broken() -> str:
    raise RuntimeError("driver not found")


PROBES = {
    "one": lambda: "platforms_under_test:FirstPlatform",
    "two": lambda: "platforms_under_test.SecondPlatform",
    "absent": lambda: None,
    "broken": broken,
    "dangling": lambda: "platforms_under_test:Nothing",
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretends that these probes are installed as platform plugins."""
    module = ModuleType("platforms_under_test")
    vars(module).update(FirstPlatform=FirstPlatform, SecondPlatform=SecondPlatform, **PROBES)
    monkeypatch.setitem(sys.modules, "platforms_under_test", module)
    monkeypatch.delenv("QUIRE_PLATFORM", raising=False)
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    monkeypatch.delitem(platforms.BUILT_IN, "oracle", raising=False)  # which tests of the conformance suite make known
    platforms._platform_at.cache_clear()

    def install_these(*names: str) -> None:
        points = {name: f"platforms_under_test:{name}" for name in names}
        pretend_installed(monkeypatch, plugins.PLATFORM_GROUP, points)

    return install_these


def test_without_plugins_the_cpu_serves(install) -> None:
    install()
    assert current_platform().name == "cpu" and current_platform("cpu") is current_platform()


def test_a_plugin_that_says_yes_beats_the_built_in_ones(install) -> None:
    install("absent", "one")
    assert current_platform().name == "first"
    assert current_platform("cpu").name == "cpu"


def test_a_plugin_that_says_no_changes_nothing(install) -> None:
    install("absent")
    assert current_platform().name == "cpu"


def test_two_that_say_yes_are_an_error_that_names_both(install) -> None:
    install("one", "two")
    with pytest.raises(ConfigError, match=r"one and two both claim.*QUIRE_PLATFORM"):
        current_platform()


@pytest.mark.parametrize(
    ("choice", "expected"), [("two", "second"), ("one", "first"), ("second", "second"), ("cpu", "cpu")]
)
def test_the_variable_chooses_by_the_plugins_or_the_platforms_name(
    install, monkeypatch: pytest.MonkeyPatch, choice: str, expected: str
) -> None:
    install("one", "two")
    monkeypatch.setenv("QUIRE_PLATFORM", choice)
    assert current_platform().name == expected


def test_the_device_setting_goes_before_the_variable(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("one")
    monkeypatch.setenv("QUIRE_PLATFORM", "one")
    assert current_platform("cpu").name == "cpu"


def test_the_allow_list_hides_plugins(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("one", "two")
    monkeypatch.setenv("QUIRE_PLUGINS", "two")
    assert current_platform().name == "second"


def test_an_unknown_name_lists_what_there_is(install) -> None:
    install("one")
    with pytest.raises(
        ConfigError,
        match=r"device='cpx' is not a platform \(did you mean 'cpu'\?\); allowed: auto, cuda, cpu, rocm, xpu, mps, one",
    ):
        current_platform("cpx")


def test_an_unknown_name_in_the_variable_is_named_so(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("QUIRE_PLATFORM", "tpu9")
    with pytest.raises(ConfigError, match="QUIRE_PLATFORM='tpu9' is not a platform"):
        current_platform()


def test_a_broken_plugin_stops_nothing_else_unless_it_is_the_one_that_was_chosen(
    install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken", "one")
    assert current_platform().name == "first"
    assert "'broken'" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="'broken' failed: driver not found"):
        current_platform("broken")


def test_a_chosen_plugin_that_cannot_run_here_says_so(install) -> None:
    install("absent")
    with pytest.raises(ConfigError, match=r"device='absent'.*cannot run here"):
        current_platform("absent")


def test_a_class_path_that_leads_nowhere_is_named(install) -> None:
    install("dangling")
    with pytest.raises(ConfigError, match="'platforms_under_test:Nothing' cannot be loaded"):
        current_platform()
