"""What all tests share."""

import os
import signal

if not os.path.exists("/dev/nvidiactl"):  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, which children inherit: tests of Ctrl-C need the default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
