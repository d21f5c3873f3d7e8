"""What a platform (a kind of device) is: one class, found by an entry point or built in. Nothing above asks `is_cuda()`.

Names no torch type at run time, so that the configuration can ask a platform questions without importing torch.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Because(Generic[T]):
    """A value with its reason; `quire explain` prints both."""

    value: T
    why: str


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What the device can do. Asked at each decision instead of its name.

    Attributes:
        dtypes: weight types it computes with, best first; `dtype=auto` takes the checkpoint's if it is in here.
        activation_dtype: type of the buffers between layers; `model` means the weights' own type.
        graphs: `none`, `decode` or `whole_step`: how much of a step can be recorded and replayed.
        async_output: results can be fetched while the next step runs.
        max_num_batched_tokens, max_num_seqs: defaults (offline, server) when the user gives none.
    """

    dtypes: Because[tuple[str, ...]]
    activation_dtype: Because[str]
    graphs: Because[str]
    async_output: Because[bool]
    fp8: Because[bool]
    sleep: Because[bool]
    page_alignment: Because[int]
    max_num_batched_tokens: Because[tuple[int, int]]
    max_num_seqs: Because[tuple[int, int]]
    swap: Because[bool]


class RecordedStep(abc.ABC):
    """A step that was recorded once and can be run again without Python between its kernels."""

    @abc.abstractmethod
    def replay(self, num_tokens: int, num_logits: int) -> None:
        """Run it for this many tokens and logits rows (at most those it was recorded with)."""


class DeviceRuntime(abc.ABC):
    """The only object that touches torch.cuda and its like."""

    @abc.abstractmethod
    def device(self) -> torch.device:
        """This worker's device."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything submitted."""

    @abc.abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory that this process may use."""

    @abc.abstractmethod
    def peak_memory(self) -> int:
        """Peak bytes this process has had allocated on the device since the worker started."""

    def kv_cache_cap(self) -> Because[int] | None:
        """Bytes that pages may take unless the user names a size; None where the configured share is the only limit."""
        return None

    @abc.abstractmethod
    def record(self, function: Callable[[], Any], num_tokens: int, num_logits: int) -> RecordedStep | None:
        """Call `function` once, recording its kernels over buffers with `num_tokens` and `num_logits` rows (whether they
        also compute is the device's choice); None where nothing can be recorded (the step then runs eagerly)."""


class Platform(abc.ABC):
    """A kind of device. `name` is what `--device` and kernels call it."""

    name: str

    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """Asked by the configuration (any process, no torch import if it can be helped)."""

    @abc.abstractmethod
    def check_config(self, config: EngineConfig) -> EngineConfig:
        """The last word on a configuration: raise ConfigError for what cannot work here, or return a changed copy."""

    @abc.abstractmethod
    def runtime(self, config: EngineConfig) -> DeviceRuntime:
        """Made once in each worker, before the model."""

    @abc.abstractmethod
    def select_kernels(self) -> None:
        """Register this platform's kernels and choose one for every operation; once in each worker."""

    @abc.abstractmethod
    def attention_backends(self) -> list[str]:
        """Class paths (`module:attribute`) of the backends to ask, best first."""

    def worker_class(self) -> str:
        """Class path of the worker."""
        return "quire.worker.worker:Worker"
