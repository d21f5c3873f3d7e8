"""What all tests share."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

if not os.path.exists("/dev/nvidiactl"):  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """No time limits for drawn examples. A shell starts background jobs with SIGINT ignored, which children inherit: tests of
    Ctrl-C need the default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = hypothesis.HealthCheck.too_slow  # a machine under load is no failure
    hypothesis.settings.register_profile("quire", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("quire")


@pytest.fixture
def kept_selection() -> Iterator[None]:
    """Which kernels are chosen is the process's state: after the test it is what it was before."""
    from quire.kernels import registry

    before = registry.choices()
    yield
    registry.use(before)
