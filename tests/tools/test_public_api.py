"""The public names are those that were written down, and a change that breaks a program is found."""

from pathlib import Path

import pytest
from tools.public_api import Change, as_text, compare, from_text, overdue, public_modules, read_api

from quire.version import __version__
from tools import public_api

OLD = """
LIMIT = 4
class Thing:
    size: int = 1
    def run(self, first, second=2, *, third=None): ...
    def stop(self): ...
def make(name, *args, kind="a, (b", **kwargs): ...
def gone(): ...
def _inner(): ...
"""
NEW = """
LIMIT = 5
class Thing:
    size: int = 1
    def run(self, second=3, first=1, *, third=None, fourth=4): ...
    def halt(self): ...
def make(name, needed, *args, kind="a, (b", **kwargs): ...
"""


def api_of(folder: Path, text: str) -> dict[str, str]:
    package = folder / str(len(list(folder.iterdir()))) / "quire"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return read_api(package.parent, ["quire"])


def test_the_public_names_are_those_that_were_written_down() -> None:
    modules = public_modules(public_api.STABILITY.read_text(encoding="utf-8"))
    assert len(modules) >= 12
    found = compare(
        from_text(public_api.SNAPSHOT.read_text(encoding="utf-8")), read_api(public_api.ROOT / "src", modules)
    )
    told = "\n".join(map(str, found))
    assert not found, f"{told}\nIf this is meant: python tools/public_api.py --write (and docs/stability.md)"


def test_every_kind_of_breaking_change_is_found(tmp_path: Path) -> None:
    changes = compare(api_of(tmp_path, OLD), api_of(tmp_path, NEW))
    assert changes == [
        Change("quire.Thing.halt", "added", False),
        Change("quire.Thing.run", "the parameter first has a default now (1)", False),
        Change("quire.Thing.run", "the parameter first has moved", True),
        Change("quire.Thing.run", "the parameter fourth is new", False),
        Change("quire.Thing.run", "the parameter second had the default 2, and has 3", True),
        Change("quire.Thing.run", "the parameter second has moved", True),
        Change("quire.Thing.stop", "removed", True),
        Change("quire.gone", "removed", True),
        Change("quire.make", "the parameter needed is new and has no default", True),
    ]


def test_a_removed_parameter_of_a_real_name_is_found() -> None:
    old = from_text(public_api.SNAPSHOT.read_text(encoding="utf-8"))
    name = "quire.LLM.generate"
    new = {**old, name: old[name].replace("sampling_params=None, ", "")}
    assert new[name] != old[name]
    assert Change(name, "the parameter sampling_params is gone", True) in compare(old, new)


@pytest.mark.parametrize(
    "old, new, breaks",
    [
        ("function (a, --b=1)", "function (a, b=1)", False),
        ("function (a, b=1)", "function (a, --b=1)", True),
        ("function (a=1)", "function (a)", True),
        ("function (a)", "function (a, *args, **kwargs)", False),
        ("function ()", "class ()", True),
    ],
)
def test_a_parameter_may_become_freer_and_not_stricter(old: str, new: str, breaks: bool) -> None:
    assert any(change.is_breaking for change in compare({"quire.f": old}, {"quire.f": new})) is breaks


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    api = api_of(tmp_path, OLD)
    assert from_text(as_text(api)) == api and "quire._inner" not in api
    assert api["quire.make"] == "function (name, *args, --kind='a, (b', **kwargs)"


def test_a_deprecated_name_is_found_when_its_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text('@deprecated(since="0.2", use="new")\ndef old(): ...\n')
    assert overdue(tmp_path, "0.3.5") == []
    assert overdue(tmp_path, "0.4.0") == overdue(tmp_path, "1.0.0") == ["old.py:1 deprecated since 0.2"]


def test_no_deprecated_name_has_outlived_its_time() -> None:
    assert overdue(public_api.ROOT / "src", __version__) == []
