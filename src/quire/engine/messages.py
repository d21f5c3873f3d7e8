"""Every message that crosses the border between a frontend and an engine core, and how it becomes bytes.

Typed msgpack both ways: a message that is not one of these is an error, and nothing is ever unpickled. Of sockets it knows
how one is made.
"""

import enum
from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from quire.errors import CapacityError, EngineError, QuireError, RequestError
from quire.request import TOKEN_BYTES, EngineCoreOutputs, EngineRequest, Refusal, TokenIds

MessageT = TypeVar("MessageT")


class Utility(enum.StrEnum):
    """What a frontend may call on a core, besides adding and aborting requests."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    IS_SLEEPING = "is_sleeping"
    RELEASE_KV_CACHE = "release_kv_cache"
    PAUSE = "pause"
    RESUME = "resume"
    PAUSE_STATE = "pause_state"
    IS_STANDING_STILL = "is_standing_still"
    ABORT_NAMED = "abort_named"
    STATS = "stats"
    EXPLAIN = "explain"
    INSPECT = "inspect"
    TIMELINE = "timeline"
    COLLECTIVE_RPC = "collective_rpc"


class Start(msgspec.Struct, tag="start", array_like=True):
    """First message to a new core process: its configuration as plain data, and the class path of its executor, if not
    the usual one."""

    config: dict[str, Any]
    executor: str | None = None


class AddRequests(msgspec.Struct, tag="add", array_like=True):
    """Requests to queue, in order."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Requests to forget; unknown ids are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="call", array_like=True):
    """Call a utility; answered by a `UtilityResult` with the same `call_id`."""

    call_id: int
    utility: Utility
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End now; unfinished requests are dropped."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The core serves.

    Attributes:
        num_blocks, block_size: the KV cache's pages, and the tokens of one.
        max_model_len: tokens that a request may have, which the core chooses where the user left it open.
        max_concurrency: how many requests of that length fit into the cache at once.
    """

    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    max_concurrency: float = 0.0


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """One step's news."""

    outputs: EngineCoreOutputs


class UtilityResult(msgspec.Struct, tag="result", array_like=True):
    """A call's value, or the error's message; `refusal` is set where the caller is at fault, or there is no room."""

    call_id: int
    value: Any = None
    error: str | None = None
    refusal: Refusal | None = None

    def to_error(self) -> QuireError:
        """The exception that `error` and `refusal` stand for."""
        message, refusal = self.error or "", self.refusal
        if refusal is None:
            return EngineError(message)
        if refusal.is_capacity:
            return CapacityError(message, retry_after=refusal.retry_after)
        return RequestError(message, param=refusal.param)


def refusal_of(error: BaseException) -> Refusal | None:
    """What an error says about whose fault it is; None where it is the engine's."""
    if isinstance(error, CapacityError):
        return Refusal(is_capacity=True, retry_after=error.retry_after)
    return Refusal(param=error.param) if isinstance(error, RequestError) else None


class Dead(msgspec.Struct, tag="dead", array_like=True):
    """The core's last words. `setting` is set where a configuration error ended its start."""

    message: str
    is_config_error: bool = False
    setting: str | None = None


FrontendMessage = Start | AddRequests | AbortRequests | UtilityCall | Shutdown
CoreMessage = Ready | Outputs | UtilityResult | Dead


def _encode_other(value: Any) -> Any:
    """What msgpack does not know: token ids become their bytes, numpy arrays and scalars lists and numbers; functions cannot
    travel."""
    if isinstance(value, array):
        return cast("TokenIds", value).tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return cast("Any", value).tolist()
    if callable(value):
        raise RequestError(
            "logits_processors are functions and cannot be sent to an engine core in another process; run the core "
            "in-process, or give the engine a logits processor class by its path",
            param="logits_processors",
        )
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _decode_other(expected: Any, value: Any) -> Any:
    if expected == TokenIds and isinstance(value, bytes) and len(value) % TOKEN_BYTES == 0:
        return array("i", value)
    raise ValueError(f"a {expected} cannot come from another process, but {value!r} did")


class Codec(Generic[MessageT]):
    """Messages to bytes and back, for one direction."""

    def __init__(self, decoder: Callable[[bytes], MessageT]) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
        self.decode = decoder

    def encode(self, message: Any) -> bytes:
        """One message as bytes. Raises RequestError: it holds a function."""
        try:
            return self._encoder.encode(message)
        except RequestError:
            if not isinstance(message, UtilityCall):
                raise
        raise RequestError(
            "a function cannot be sent to an engine core in another process: name a method of the worker (worker_cls gives it "
            "methods of your own), or run the core in-process",
            param="method",
        )


def frontend_to_core() -> Codec[FrontendMessage]:
    return Codec(msgspec.msgpack.Decoder(FrontendMessage, dec_hook=_decode_other).decode)


def core_to_frontend() -> Codec[CoreMessage]:
    return Codec(msgspec.msgpack.Decoder(CoreMessage, dec_hook=_decode_other).decode)


def zmq_socket(context: Any, kind: int, address: str, *, bind: bool, linger_ms: int = 0) -> Any:
    """A socket that keeps whatever is sent until it is read, however much that is."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = linger_ms
    (socket.bind if bind else socket.connect)(address)
    return socket
