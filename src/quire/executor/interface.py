"""What the engine core asks of an executor, which runs the steps: on one worker in this process, or on one process a device.

Floors: the interface names no torch type, so that tests implement it without torch.
"""

import abc
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.errors import RequestError
from quire.executor import wire
from quire.media import MediaItem
from quire.request import EngineRequest


def find_method(worker: object, name: str) -> Callable[..., Any]:
    """A worker's public method. Raises RequestError: it has none of this name."""
    method = getattr(worker, name, None)
    if name.startswith("_") or not callable(method):
        raise RequestError(f"the worker has no method {name!r}", param="method", value=name)
    return method


class Executor(abc.ABC):
    """Runs steps. The engine core calls, in this order: constructor (loads the model), `kv_cache_specs`,
    `available_kv_bytes`, `initialize`, then `execute` for every step, at last `shutdown`.

    `execute` and `collect` are split so that planning of step N+1 overlaps execution of step N: `execute` starts a step
    and may return at once; `collect` waits for the oldest one that was started. At most two steps are in flight.

    Attributes:
        on_failure: called, in any thread, when workers have ended by themselves while no call waits for them; the next call of
            any method raises.
    """

    on_failure: Callable[[], None] | None = None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec a layer."""

    @abc.abstractmethod
    def available_kv_bytes(self) -> int:
        """Bytes that are left for pages once weights and activations have theirs."""

    @abc.abstractmethod
    def initialize(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the pages and warm up. Raises ConfigError when it cannot fit."""

    @abc.abstractmethod
    def execute(self, step: SchedulerOutput) -> None:
        """Start one step."""

    @abc.abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """The result of the oldest step that was started and not yet collected. Blocks."""

    def check_request(self, request: EngineRequest) -> None:
        """Raises RequestError for a request that the workers cannot be given."""

    def is_prepared(self, request: EngineRequest) -> bool:
        """Whether steps can have a request that gets tokens at once: its grammar is compiled, as far as is known, and what its
        sampling needs was used before."""
        return True

    def prepare(self, request: EngineRequest) -> None:
        """Have the workers compile what a request needs, beside their steps. What cannot be compiled is told of by its row."""
        assert request.sampling_params is not None
        self._begin(request, wire.Compile(request.sampling_params))

    def load_adapter(self, request: EngineRequest, slot: int) -> None:
        """Have the workers load a request's adapter into a place, beside their steps; `prepared` tells of the end."""
        assert request.adapter is not None
        self._begin(request, wire.LoadAdapter(request.adapter, slot))

    def fetch_pages(self, request: EngineRequest, names: list[bytes]) -> None:
        """Have the workers' connectors bring pages to their hosts, beside their steps; `prepared` tells of the end."""
        self._begin(request, wire.FetchPages(request.request_id, names))

    def encode_media(self, request: EngineRequest, items: list[MediaItem]) -> None:
        """Have the workers' encoders compute a request's items beside their steps; `prepared` tells of the end. What cannot be
        computed there is computed by the step that needs it."""
        self._begin(request, wire.EncodeMedia(items))

    def _begin(self, request: EngineRequest, what: wire.Preparation) -> None:
        """Have the workers prepare something for a request."""
        raise NotImplementedError(f"{type(self).__name__} prepares nothing")

    def problems(self) -> dict[str, str]:
        """By id of a request that `prepared` has told since the last call, why its adapter or pages could not be had."""
        return {}

    def prepared(self, wait_s: float) -> list[str]:
        """Ids of requests whose preparation has ended since the last call, well or not; waits at most so long for the first."""
        return []

    def encodes_beside(self) -> bool:
        """Whether `encode_media` can be asked for."""
        return False

    def prepare_to_serve(self, wait: bool = False) -> None:
        """Begin, in other threads, what the first request of a kind would wait for; or wait until it is done."""

    def idle(self) -> bool:
        """There is nothing to do: prepare for later work, a little at a time (capture a graph). Called with no step in flight,
        and a request that arrives meanwhile waits for its end. True where another call could do more."""
        return False

    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 drops the pages, level 2 the weights too."""
        raise NotImplementedError(f"{type(self).__name__} cannot sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`."""
        raise NotImplementedError(f"{type(self).__name__} cannot sleep")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a worker's method on every worker, or a function whose first argument is the worker (only where workers are in
        this process).
        Raises RequestError: there is no such method, or a function cannot reach the workers.
        Raises TimeoutError: workers of other processes have not answered within `timeout` seconds."""
        raise NotImplementedError(f"{type(self).__name__} has no workers to call")

    def explain(self) -> dict[str, Any]:
        """What was chosen and why: kernels, attention backend, memory split. For `quire explain`."""
        return {}

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
