"""The first use of each sampling feature, in a thread beside the steps, so that no step compiles or loads what it needs.

A request that needs a feature which was not used yet is held back by the scheduler until it was; others go on. What requests
wait for comes first. Knows features by name; knows nothing of steps.
"""

import concurrent.futures
import threading
from collections.abc import Callable

from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime
from quire.processes import yielding
from quire.sample.feature_batches import FeatureBatches
from quire.sample.features import FEATURES, features_of
from quire.sampling_params import SamplingParams

logger = init_logger(__name__)

_LOOK_S = 0.02
"""Between two looks whether kernels are compiled."""


class FeatureUses:
    """Uses every feature once.

    Args:
        make_batches: the batches that use them; called in the thread that begins.
    """

    def __init__(self, runtime: DeviceRuntime, make_batches: Callable[[], FeatureBatches]) -> None:
        self._runtime, self._make_batches = runtime, make_batches
        self._batches: FeatureBatches | None = None
        self._left: list[str] = list(FEATURES) if runtime.loads_kernels_late else []
        self._changed = threading.Condition()
        self._waiting: list[tuple[set[str], concurrent.futures.Future[None]]] = []
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def rehearse(self) -> None:
        """Have the kernels of all features compiled, behind those of the steps."""
        if self._left:
            self._batches = self._make_batches()
            for name in self._left:
                self._runtime.rehearse(lambda name=name: self._run(name), feature=name)

    def begin(self) -> None:
        """Start the thread."""
        if self._left and self._thread is None:
            self._thread = threading.Thread(target=self._use_all, name="first-uses", daemon=True)
            self._thread.start()

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether a request finds all that it needs."""
        return not self._left or set(self._left).isdisjoint(features_of(params))

    def when_ready(self, params: SamplingParams) -> concurrent.futures.Future[None]:
        """Ends when a request finds all that it needs; this is done before what nobody waits for."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            needs = set(self._left).intersection(features_of(params))
            if needs and not self._is_stopped:
                self._waiting.append((needs, future))
                for name in needs:
                    self._runtime.hasten(name)
                self._changed.notify_all()
                return future
        future.set_result(None)
        return future

    def stop(self) -> None:
        """Begin nothing more; requests that wait are let go."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread's end, after `stop`."""
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, name: str) -> None:
        assert self._batches is not None
        self._batches.run(name)

    def _use_all(self) -> None:
        """In the thread."""
        try:
            with yielding(), self._runtime.beside_steps():
                if self._batches is None:
                    self._batches = self._make_batches()
                while (name := self._next()) is not None:
                    self._use(name)
        except Exception:
            logger.exception("features are not used ahead: the first request with each is slow")
        finally:
            self._batches = None
            with self._changed:
                self._left = []
                self._let_go()
            self._runtime.settled()

    def _use(self, name: str) -> None:
        try:
            self._run(name)
        except Exception as error:  # the request that needs it is told
            logger.warning("the feature %s could not be used ahead (%s: %s)", name, type(error).__name__, error)
        # Of its own work only: the device as a whole cannot be waited for while a step is being captured.
        done = self._runtime.event()
        done.record()
        done.wait()
        with self._changed:
            self._left = [other for other in self._left if other != name]
            self._let_go()

    def _next(self) -> str | None:
        """The feature to use now: one that a request waits for, or whose kernels are compiled; None when all is done."""
        with self._changed:
            while self._left and not self._is_stopped:
                wanted = {name for needs, _ in self._waiting for name in needs}
                ready = [name for name in self._left if self._runtime.is_compiled(name)]
                for name in (*(name for name in ready if name in wanted), *ready):
                    return name
                self._changed.wait(_LOOK_S)
        return None

    def _let_go(self) -> None:
        """With the lock held: requests that need nothing more go on."""
        left = set(self._left)
        for needs, future in self._waiting:
            needs &= left
            if not needs:
                future.set_result(None)
        self._waiting = [(needs, future) for needs, future in self._waiting if needs]
