"""Every message between an executor and its workers' processes. Knows no pipes and no memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from quire.adapters import LoRARequest
from quire.codec import decoder
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.errors import ConfigError, EngineError, RequestError, describe
from quire.media import MediaItem
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import concurrent.futures


class Start(msgspec.Struct, tag="start", array_like=True):
    """First message: the configuration as plain data, and the sender's patches. Each worker knows its rank already."""

    config: dict[str, Any]
    patches: list[str] = []


class Step(msgspec.Struct, tag="step", array_like=True):
    """Compute one step; rank 0 answers with a `Result`."""

    plan: SchedulerOutput


class Call(msgspec.Struct, tag="call", array_like=True):
    """Call a method of the worker; every rank answers with an `Answer`."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Compile(msgspec.Struct, tag="prepare", array_like=True):
    """What a request is sampled with: its grammar, and the kernels of features."""

    params: SamplingParams


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True):
    """An adapter, into a place."""

    adapter: LoRARequest
    slot: int


class FetchPages(msgspec.Struct, tag="fetch_pages", array_like=True):
    """Pages that are elsewhere."""

    request_id: str
    names: list[bytes]


class EncodeMedia(msgspec.Struct, tag="encode_media", array_like=True):
    """Embeddings of items."""

    items: list[MediaItem]


Preparation = Compile | LoadAdapter | FetchPages | EncodeMedia
"""Each is tagged with the worker's method that begins it, and has its arguments."""


class Prepare(msgspec.Struct, tag="prepare", array_like=True):
    """Prepare something beside the steps; every rank answers with a `Prepared` when that has ended."""

    number: int
    what: Preparation


class End(msgspec.Struct, tag="end", array_like=True):
    """End in good order."""


class Result(msgspec.Struct, tag="result", array_like=True):
    """What a step produced."""

    output: ModelRunnerOutput


_ERRORS: dict[str, type[Exception]] = {
    "config": ConfigError,
    "request": RequestError,
    "memory": MemoryError,
    "value": ValueError,
}
"""What a problem is raised as, by its kind; whatever else happens is an engine's error."""


class Problem(msgspec.Struct, array_like=True):
    """An error on its way to the parent. `at_ns` is the host's monotonic clock: the earliest error is the cause of others.

    Attributes:
        kind: `config`, `request`, `memory`, `value` or `engine`: what is raised from it.
        setting: of a configuration error; of a request's, the field at fault.
    """

    kind: str
    message: str
    setting: str | None = None
    at_ns: int = 0

    def to_error(self, who: str = "") -> Exception:
        """The exception; `who` is put before the message of an engine's error."""
        named = f"{who}: {self.message}" if who else self.message
        match self.kind:
            case "config":
                return ConfigError(self.message, setting=self.setting)
            case "request":
                return RequestError(named, param=self.setting)
            case "memory" | "value":
                return _ERRORS[self.kind](self.message)
            case _:
                return EngineError(named)


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """A call's value, or why there is none."""

    call_id: int
    value: Any = None
    problem: Problem | None = None


class Prepared(msgspec.Struct, tag="prepared", array_like=True):
    """A preparation has ended; `problem` says why it has failed."""

    number: int
    problem: str | None = None


ToWorker = Start | Step | Call | Prepare | End
FromWorker = Result | Answer | Prepared


decode_to_worker: Callable[[bytes], ToWorker] = decoder(ToWorker)
"""What the executor said."""

decode_from_worker: Callable[[bytes], FromWorker] = decoder(FromWorker)
"""What a worker said."""

decode_problem: Callable[[bytes], Problem] = decoder(Problem)
"""A worker's last words."""


def begin(worker: Any, what: Preparation) -> "concurrent.futures.Future[Any]":
    """Have a worker prepare something."""
    return getattr(worker, str(what.__struct_config__.tag))(*msgspec.structs.astuple(what))


def describe_failure(future: "concurrent.futures.Future[Any]") -> str | None:
    """Why a preparation that has ended has failed; None: it has not."""
    error = future.exception()
    return None if error is None else str(error)


def problem_of(error: BaseException, at_ns: int) -> Problem:
    """An error as data."""
    kind = next((kind for kind, known in _ERRORS.items() if isinstance(error, known)), "engine")
    setting = error.setting if isinstance(error, ConfigError) else getattr(error, "param", None)
    return Problem(kind, describe(error) if kind == "engine" else str(error), setting, at_ns)
