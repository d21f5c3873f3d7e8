"""A thread in which masks are made while the caller goes on.

The work itself runs outside of the interpreter's lock. The caller waits until it has begun: Python would otherwise let the
caller keep the lock for milliseconds.
"""

import queue
import threading
from collections.abc import Callable


class Job:
    """Something that is being done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """In the thread."""
        self._begun.release()
        try:
            self._work()
        except BaseException as error:  # told to whoever waits
            self._error = error
        finally:
            self._done.release()

    def wait_until_begun(self) -> None:
        """Once."""
        self._begun.acquire()

    def finish(self) -> None:
        """Wait for its end, once; raises what it raised."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class FillThread:
    """Does one job after the other. The thread starts with the first and ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> Job:
        """Returns when the work has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-masks", daemon=True)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        job.wait_until_begun()
        return job

    def _run(self) -> None:
        while True:
            self._jobs.get().run()
