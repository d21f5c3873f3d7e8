"""A deprecated name works, and tells its caller what to use instead."""

import warnings

import pytest

from quire import deprecation
from quire.deprecation import QuireDeprecationWarning, deprecated, removed_in, warn_deprecated


@deprecated(since="0.2", use="quire.new")
def old(a: int, *, b: int = 1) -> int:
    """Adds."""
    return a + b


@deprecated(since="0.2", use="quire.New")
class Old:
    """Holds."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_function_works_and_warns_at_its_callers_line() -> None:
    with pytest.warns(
        QuireDeprecationWarning, match=r"old is deprecated since Quire 0.2 .* removed in 0.4: use quire.new"
    ) as caught:
        assert old(1, b=2) == 3
    assert caught[0].filename == __file__
    assert old.__doc__ == "Adds." and "quire.new" in old.__deprecated__


def test_a_class_works_is_a_class_and_warns() -> None:
    with pytest.warns(QuireDeprecationWarning, match=r"use quire.New"):
        assert Old(3).value == 3
    assert isinstance(Old, type) and issubclass(Old, object)


def test_a_setting_warns_at_the_line_that_gives_it() -> None:
    def takes(setting: int) -> None:
        warn_deprecated("setting", since="1.9", use="another")

    with pytest.warns(QuireDeprecationWarning, match=r"removed in 1.11: use another") as caught:
        takes(1)
    assert caught[0].filename == __file__


def test_python_shows_the_warning_once_for_each_place_without_being_asked() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default", deprecation.QuireDeprecationWarning)
        for _ in range(3):
            old(1)
        old(1)
    assert len(caught) == 2 and issubclass(QuireDeprecationWarning, FutureWarning)


def test_a_name_goes_two_minor_versions_later() -> None:
    assert (removed_in("0.2"), removed_in("1.0.3")) == ("0.4", "1.2")
