"""Faults that are asked for happen at their point, at their pass, in their process, and nowhere else."""

import importlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import faults
from quire.errors import ConfigError
from quire.faults import POINTS, Fault, begin_process, install, parse
from quire.processes import Child


class Loop:
    """What stands in for an engine."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step(self, word: str) -> str:
        """A point."""
        self.seen.append(word)
        return word.upper()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A loop whose `step` is the point `step`, and whose processes note their deaths."""
    monkeypatch.setattr(Loop, "step", Loop.step)  # so that it is put back
    monkeypatch.setitem(POINTS, "step", (f"{__name__}:Loop.step",))
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(Loop=Loop))
    made = Loop()
    monkeypatch.setattr(os, "kill", lambda pid, number: made.seen.append(signal.Signals(number).name))
    return made


def ask(monkeypatch: pytest.MonkeyPatch, text: str, process: str = "core") -> None:
    monkeypatch.setenv("QUIRE_FAULTS", text)
    begin_process(process)


@pytest.mark.parametrize("point", POINTS)
def test_each_point_is_a_function(point: str) -> None:
    for path in POINTS[point]:
        module, _, name = path.partition(":")
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        assert callable(value)


def test_a_fault_is_read_with_all_its_parts() -> None:
    assert parse("before-execute:kill") == [Fault("execute", True, "", "kill")]
    assert parse("after-step@rank 1:stop:12:/a/file,before-send:kill:3") == [
        Fault("step", False, "rank 1", "stop", 12, "/a/file"),
        Fault("send", True, "", "kill", 3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("execute:kill", "before-POINT or after-POINT"),
        ("before-dinner:kill", "one of these points: load, start"),
        ("before-step:burn", "the action is one of kill, stop"),
        ("before-step:kill:0", "a whole number above 0"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert caught.value.setting == "QUIRE_FAULTS"


def test_it_happens_at_its_pass_before_or_after(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "before-step:kill:2,after-step:stop:3")
    assert [loop.step(word) for word in "abcd"] == list("ABCD")
    assert loop.seen == ["a", "SIGKILL", "b", "c", "SIGSTOP", "d"]


def test_a_file_says_when_and_how_often(loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "now"
    ask(monkeypatch, f"before-step:kill:2:{file}")
    file.touch()
    for word in "abc":
        loop.step(word)
    assert loop.seen == ["a", "SIGKILL", "b", "c"] and not file.exists()
    file.touch()
    loop.step("d")
    assert loop.seen[-2:] == ["SIGKILL", "d"]


def test_another_process_is_not_touched(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Loop.step
    ask(monkeypatch, "before-step@rank 1:kill", process="rank 0")
    assert Loop.step is before
    ask(monkeypatch, "before-step@rank 1:kill", process="rank 1")
    assert Loop.step is not before


def test_without_the_variable_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_FAULTS", raising=False)
    monkeypatch.setattr(faults, "install", lambda *_: pytest.fail("a fault that nobody asked for"))
    begin_process("core")


def run_child(arguments: list[str]) -> int:
    """In a child: pass a point of the engine's, with the fault that kills."""
    from quire.processes import begin_child

    begin_child(arguments)
    passed: list[int] = []
    install("send", True, lambda: passed.append(1))
    begin_process("core")
    from unittest import mock

    from quire.engine.core_loop import CoreLoop
    from quire.request import EngineCoreOutputs

    loop = CoreLoop(mock.Mock(), mock.Mock(), lambda _: None)
    for _ in range(5):
        loop.tell(EngineCoreOutputs())
    return 77


def test_a_process_kills_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAULTS", "after-send@core:kill:4")
    child = Child("tests.test_faults:run_child")
    assert child.describe_exit() == "was killed by SIGKILL"
    child.close()
