"""The table of environment variables."""

import types
import typing

import pytest

from quire import envs
from quire.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_variable_is_read_when_it_is_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.QUIRE_TRACE_FUNCTION is False
    monkeypatch.setenv("QUIRE_TRACE_FUNCTION", "yes")
    assert envs.QUIRE_TRACE_FUNCTION is True


@pytest.mark.parametrize("name", sorted(envs.VARIABLES))
def test_every_variable_has_a_default_of_its_kind_and_a_text(name: str) -> None:
    declared = typing.get_type_hints(envs)[name]
    kinds = typing.get_args(declared) if typing.get_origin(declared) in (typing.Union, types.UnionType) else (declared,)
    assert isinstance(getattr(envs, name), tuple(typing.get_origin(kind) or kind for kind in kinds))
    assert envs.VARIABLES[name].doc.endswith(".")


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("QUIRE_TRACE_FUNCTION", "maybe", "true"),
        ("QUIRE_LOGGING_LEVEL", "LOUD", "WARNING"),
        ("QUIRE_LOG_STATS_INTERVAL", "-1", "above 0"),
        ("QUIRE_LOG_STATS_INTERVAL", "nan", "above 0"),
        ("QUIRE_HTTP_TIMEOUT_KEEP_ALIVE", "5.5", "whole number"),
        ("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "-1", "or 0 for never"),
        ("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "soon", "or 0 for never"),
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_says_what_does(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as error:
        getattr(envs, name)
    assert name in str(error.value) and text in str(error.value) and allowed in str(error.value)
    assert error.value.setting == name


def test_a_list_is_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", " a, b ,")
    assert envs.QUIRE_PLUGINS == ["a", "b"]
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    assert envs.QUIRE_PLUGINS == []


def test_unknown_names_are_found_with_what_was_probably_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOGGING_LEVLE", "DEBUG")
    monkeypatch.setenv("QUIRE_ZZZ", "1")
    found = dict(envs.unknown_variables())
    assert found["QUIRE_LOGGING_LEVLE"] == "QUIRE_LOGGING_LEVEL"
    assert found["QUIRE_ZZZ"] is None


def test_an_unknown_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="QUIRE_NOPE"):
        typing.cast("typing.Any", envs).QUIRE_NOPE  # noqa: B018
