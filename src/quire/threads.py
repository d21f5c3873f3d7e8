"""Calls that nothing can end, waited for as long as somebody has time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin_call(call: Callable[[], T], name: str) -> Future[T]:
    """A call in a thread of its own, and what it will give."""
    ended = Future[T]()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended


def call_within(seconds: float, call: Callable[[], T], name: str) -> T:
    """What a call gives, or raises. It goes on in its thread, unheard, when time is up. Raises TimeoutError: it is."""
    return begin_call(call, name).result(max(0.0, seconds))
