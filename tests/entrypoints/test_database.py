"""Databases of the server: several processes open one file."""

import subprocess
import sys
import time
from pathlib import Path

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
