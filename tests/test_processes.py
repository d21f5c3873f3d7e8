"""Child processes find modules where their parent finds them, end with it, and hear whole messages."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.processes import EXIT_PARENT_DIED, STACKS_SIGNAL, Child, family, read_message, start_child, write_message

CHILD = """
import os
from quire.processes import begin_child, end_with_parent, name_process, read_message, write_message

def echo(arguments):
    write_message(1, ",".join(arguments).encode())
    while (message := read_message(0)) is not None:
        write_message(1, message)
    return 7

def parent(arguments):
    number, told = arguments[-2:]
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    begin_child(arguments)
    name_process("a parent")
    import subprocess, sys, time
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(grandchild.pid, 19)
    os.waitpid(grandchild.pid, os.WUNTRACED)
    with open(number + ".part", "w") as file:
        file.write(str(grandchild.pid))
    os.rename(file.name, number)
    time.sleep(600)

def watch(arguments):
    end_with_parent(int(arguments[0]))
    write_message(1, b"watching")
    read_message(0)

def watch_and_tell(arguments):
    end_with_parent(int(arguments[0]), lambda: os.write(1, b"the end"))
    write_message(1, b"watching")
    read_message(0)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that only this process's search path leads to."""
    (tmp_path / "found_by_path.py").write_text(CHILD)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return "found_by_path"


def test_a_child_gets_words_and_messages_and_gives_its_exit_code(module: str) -> None:
    child = start_child(f"{module}:echo", ["one", "two"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert read_message(child.stdout.fileno()) == b"one,two"
    write_message(child.stdin.fileno(), b"hello")
    assert read_message(child.stdout.fileno()) == b"hello"
    child.stdin.close()
    assert read_message(child.stdout.fileno()) is None
    assert child.wait() == 7
    child.stdout.close()


def test_a_child_ends_when_the_other_end_of_its_pipe_is_closed(module: str) -> None:
    read_fd, write_fd = os.pipe()
    child = start_child(
        f"{module}:watch", [str(read_fd)], keep=(read_fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    os.close(read_fd)
    assert read_message(child.stdout.fileno()) == b"watching" and child.poll() is None
    os.close(write_fd)
    assert child.wait() in (EXIT_PARENT_DIED, -signal.SIGKILL)
    child.stdin.close()
    child.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.parametrize("function", ["watch", "watch_and_tell"])
def test_children_that_are_stopped_end_with_their_parent_too(module: str, function: str) -> None:
    read_fd, write_fd = os.pipe()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [start_child(f"{module}:{function}", [str(read_fd)], keep=(read_fd,), **pipes) for _ in range(2)]
    os.close(read_fd)
    for child in children:
        assert child.stdout is not None and read_message(child.stdout.fileno()) == b"watching"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
    os.close(write_fd)
    for child in children:
        child.wait(20)
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.read() == (b"the end" if function == "watch_and_tell" else b"")
        child.stdin.close()
        child.stdout.close()


def test_messages_are_whole_however_long() -> None:
    read_fd, write_fd = os.pipe()
    messages = [b"", b"short", bytes(range(256)) * 4000]

    def write() -> None:
        for message in messages:
            write_message(write_fd, message)
        os.close(write_fd)

    thread = threading.Thread(target=write)
    thread.start()
    assert [read_message(read_fd) for _ in range(4)] == [*messages, None]
    thread.join()
    os.close(read_fd)


def test_a_child_is_killed_with_its_own_children_also_a_stopped_one(module: str, tmp_path: Path) -> None:
    number, told = tmp_path / "number", tmp_path / "told"
    child = Child(f"{module}:parent", [str(number), str(told)])
    grandchild = int(when(lambda: number.exists() and number.read_text()))
    watch = os.pidfd_open(grandchild)
    itself, stopped = family(child.pid)
    assert str(itself).startswith(f"a parent (process {child.pid}) waits") and itself.can_show_stacks
    assert f"(process {grandchild}) is stopped (SIGSTOP)" in str(stopped) and not stopped.can_show_stacks
    child.process.send_signal(STACKS_SIGNAL)
    assert when(lambda: "in parent" in told.read_text())
    child.end(0.0)
    assert child.describe_exit() == "was killed by SIGKILL"
    assert select.select([watch], [], [], 20)[0]
    os.close(watch)
    child.close()


def when(is_true: Callable[[], Any]) -> Any:
    """What a function returns once that is true."""
    deadline = time.monotonic() + 60
    while not (value := is_true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
