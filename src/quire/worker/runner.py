"""What a worker asks of its model runner; a platform says which one (`Platform.runner_class`)."""

import abc
import concurrent.futures
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.platforms.interface import DeviceRuntime, Platform
from quire.sampling_params import SamplingParams
from quire.worker.grammar_source import WorkerGrammars

if TYPE_CHECKING:
    from quire.distributed.communicator import Communicator
    from quire.layers.interface import CausalLM


class PendingStep(Protocol):
    """A step that was submitted to a device and may still run there."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it; the same again when asked again."""
        ...


class Runner(abc.ABC):
    """Turns scheduler steps into tokens on one device. Making one builds the model and reads its weights.

    Attributes:
        waited_seconds: how long the host has waited for results so far; 0 where steps run when they are executed.
    """

    _grammars: WorkerGrammars
    _config: EngineConfig
    waited_seconds: float = 0.0

    @abc.abstractmethod
    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        communicator: "Communicator | None" = None,
    ) -> None: ...

    @property
    @abc.abstractmethod
    def model(self) -> "CausalLM":
        """The loaded model."""

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer."""

    @abc.abstractmethod
    def untouched_bytes(self) -> int:
        """Device memory that steps will take and that is not taken yet."""

    @property
    def grammars(self) -> WorkerGrammars:
        """What rows with a form follow."""
        return self._grammars

    def is_prepared(self, params: SamplingParams) -> bool:
        """Whether a step may have such a request at once: what it needs is compiled."""
        return params.structured_outputs is None or self._grammars.is_compiled(params)

    def prepare(self, params: SamplingParams) -> "list[concurrent.futures.Future[Any]]":
        """Have it compiled in other threads."""
        return [] if params.structured_outputs is None else [self._grammars.compile(params)]

    @property
    @abc.abstractmethod
    def has_pages(self) -> bool:
        """Whether the cache is allocated."""

    @abc.abstractmethod
    def allocate(self, kv_cache: KVCacheConfig) -> None:
        """Allocate and bind the pages, and warm up."""

    @abc.abstractmethod
    def free_pages(self) -> None:
        """Give the cache back; rows are forgotten with it."""

    @abc.abstractmethod
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | PendingStep:
        """Run or submit one step; at most two are in flight."""

    def prepare_to_serve(self, wait: bool = False) -> None:
        """Begin, in another thread, to read the vocabulary for grammars; or wait until it is read."""
        if self._config.model.pooling is None:
            self._grammars.prepare(wait)

    def stop(self) -> None:
        """The engine ends: begin nothing beside the steps any more."""

    def join(self) -> None:
        """Wait for what runs beside the steps, after `stop`."""

    def idle(self) -> bool:
        """No step is in flight: prepare something for later; whether there is more to prepare."""
        return False

    @abc.abstractmethod
    def explain(self) -> dict[str, Any]:
        """What was chosen and why."""
