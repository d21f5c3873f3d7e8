"""A measurement's own server ends with the measurement, in whatever way that ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from quire.benchmarks.own_server import started
from quire.errors import EngineError

SERVER = ("http.server", ["0", "--bind", "127.0.0.1"], "Serving", {"PYTHONUNBUFFERED": "1"})
MEASUREMENT = f"""
import time
from quire.benchmarks.own_server import started
with started(*{SERVER!r}) as (line, process):
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_module_runs_as_with_python_m_while_it_is_wanted() -> None:
    with started(*SERVER) as (line, process):
        assert line.startswith("Serving HTTP on 127.0.0.1") and process.poll() is None
    assert process.returncode == -signal.SIGTERM


def test_one_that_ends_at_once_tells_what_it_said() -> None:
    with pytest.raises(EngineError, match=r"No module named '?no_such_module"), started("no_such_module", [], "ready"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is Linux's")
def test_it_ends_also_when_the_measurement_is_killed() -> None:
    measurement = subprocess.Popen([sys.executable, "-c", MEASUREMENT], stdout=subprocess.PIPE, text=True)
    assert measurement.stdout is not None
    watch = os.pidfd_open(int(measurement.stdout.readline()))
    measurement.kill()
    measurement.wait()
    assert select.select([watch], [], [], 20)[0]
    os.close(watch)
    measurement.stdout.close()
