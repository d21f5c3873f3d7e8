"""Calls that nothing can end, waited for as long as somebody has time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T], name: str) -> T:
    """What a call gives, or raises. It runs in a thread of its own, and goes on there, unheard, when time is up.
    Raises TimeoutError: it is."""
    ended = Future[T]()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended.result(max(0.0, seconds))
