"""What crosses the border between an executor and its workers' processes, and how it becomes bytes.

Typed msgpack both ways, arrays as their own bytes; nothing is ever unpickled. Knows no pipes and no memory.
"""

from array import array
from typing import Any, cast

import msgspec
import numpy as np

from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.errors import ConfigError, EngineError, QuireError, RequestError
from quire.request import TokenIds
from quire.sampling_params import SamplingParams

_ARRAY_TYPES = (np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_))
"""An array's type is the code of its msgpack extension, counted from 1."""


class Start(msgspec.Struct, tag="start", array_like=True):
    """First message: the configuration as plain data. Each worker knows its rank already."""

    config: dict[str, Any]


class Step(msgspec.Struct, tag="step", array_like=True):
    """Compute one step; rank 0 answers with a `Result`."""

    plan: SchedulerOutput


class Call(msgspec.Struct, tag="call", array_like=True):
    """Call a method of the worker; every rank answers with an `Answer`."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Prepare(msgspec.Struct, tag="prepare", array_like=True):
    """Compile a form's grammar beside the steps; every rank answers with a `Prepared` when that has ended."""

    number: int
    params: SamplingParams


class End(msgspec.Struct, tag="end", array_like=True):
    """End in good order."""


class Result(msgspec.Struct, tag="result", array_like=True):
    """What a step produced."""

    output: ModelRunnerOutput


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
        """The exception that it stands for; `who` is put before the message of an engine's error."""
        if self.kind == "config":
            return ConfigError(self.message, setting=self.setting)
        if self.kind == "request":
            return RequestError(f"{who}: {self.message}" if who else self.message, param=self.setting)
        if self.kind == "memory":
            return MemoryError(self.message)
        if self.kind == "value":
            return ValueError(self.message)
        return EngineError(f"{who}: {self.message}" if who else self.message)


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """A call's value, or why there is none."""

    call_id: int
    value: Any = None
    problem: Problem | None = None


class Prepared(msgspec.Struct, tag="prepared", array_like=True):
    """A preparation has ended, well or not."""

    number: int


ToWorker = Start | Step | Call | Prepare | End
FromWorker = Result | Answer | Prepared


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _ARRAY_TYPES:
        return msgspec.msgpack.Ext(_ARRAY_TYPES.index(value.dtype) + 1, value.tobytes())
    if isinstance(value, array):
        return msgspec.msgpack.Ext(1, cast("TokenIds", value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _decode_array(code: int, data: memoryview) -> Any:
    if not 1 <= code <= len(_ARRAY_TYPES):
        raise ValueError(f"unknown extension {code}")
    return np.frombuffer(data, dtype=_ARRAY_TYPES[code - 1])


def _accept_array(expected: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"an array should have come, but {value!r} did")
    return array("i", cast("IntArray", value).tobytes()) if expected == TokenIds else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_to_worker = msgspec.msgpack.Decoder(ToWorker, ext_hook=_decode_array, dec_hook=_accept_array)
_from_worker = msgspec.msgpack.Decoder(FromWorker, ext_hook=_decode_array, dec_hook=_accept_array)
_problem = msgspec.msgpack.Decoder(Problem)


def encode(message: ToWorker | FromWorker | Problem) -> bytes:
    """Any message as bytes.

    Raises:
        TypeError: it holds something that is not data.
    """
    return _encoder.encode(message)


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    """What the executor said. Arrays are read-only views of the bytes."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes | memoryview) -> FromWorker:
    """What a worker said."""
    return _from_worker.decode(data)


def decode_problem(data: bytes) -> Problem:
    """A worker's last words."""
    return _problem.decode(data)


def problem_of(error: BaseException, at_ns: int) -> Problem:
    """An error as data."""
    if isinstance(error, ConfigError):
        return Problem("config", str(error), error.setting, at_ns)
    if isinstance(error, RequestError):
        return Problem("request", str(error), error.param, at_ns)
    if isinstance(error, MemoryError):
        return Problem("memory", str(error), None, at_ns)
    if isinstance(error, QuireError):
        return Problem("engine", str(error), None, at_ns)
    if isinstance(error, ValueError):
        return Problem("value", str(error), None, at_ns)
    return Problem("engine", f"{type(error).__name__}: {error}", None, at_ns)
