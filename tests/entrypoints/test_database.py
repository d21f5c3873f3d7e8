"""Databases of the server: several processes open one file."""

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.entrypoints import database
from quire.entrypoints.database import Database
from quire.errors import ConfigError

PROGRAM = """
import sys, time
from quire.entrypoints.database import Database

print("ready", flush=True)
began = float(sys.stdin.readline())
for number in range(60):
    while time.time() < began + number / 50:
        pass
    Database(f"{sys.argv[1]}/{number}.sqlite", "CREATE TABLE IF NOT EXISTS t (a)", setting="responses_store").close()
"""


def test_a_new_file_that_two_processes_open_at_once_opens_for_both(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    began = time.time() + 0.2
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{began}\n")
    assert [child.wait(120) for child in children] == [0, 0]


def test_what_waiting_does_not_mend_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, *given, **named: plain(f"file:{path}?mode=ro", uri=True))
    monkeypatch.setattr(database.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=r"responses_store: .* cannot be opened"):
        Database(str(tmp_path / "store.sqlite"), "CREATE TABLE t (a)", setting="responses_store")
