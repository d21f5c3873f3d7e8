"""What all tests share."""

import signal


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit it: tests of Ctrl-C need it as a terminal has it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
