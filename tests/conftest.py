"""What all tests share."""

import signal


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, which children inherit: tests of Ctrl-C need the default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
