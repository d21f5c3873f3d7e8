"""Every message that crosses the border between a frontend and an engine core. Of sockets it knows how one is made."""

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from quire.codec import decoder
from quire.errors import CapacityError, DeadlineError, EngineError, QuireError, RequestError
from quire.request import EngineCoreOutputs, EngineRequest, Refusal, WeightState


class Standing(msgspec.Struct, tag="standing", array_like=True):
    """What a core was told to do besides computing, and does until it is told otherwise. A core says it when it changes; one that
    is started in its place begins with it.

    Attributes:
        is_paused: nothing is scheduled.
        sleep_level: of the last `sleep`; asleep: the parts that sleep still.
        weights: what they are, if they have changed; a core tells that with its outputs.
        pinned_adapters: numbers of those that keep their places.
    """

    is_paused: bool = False
    sleep_level: int = 0
    asleep: list[str] = []
    weights: WeightState | None = None
    pinned_adapters: list[int] = []


class Start(msgspec.Struct, tag="start", array_like=True):
    """First message to a new core process: its configuration as plain data, the class path of its executor, if not the usual
    one, how it stands, if it takes the place of one that died, whose requests wait for it, the sender's patches, and where a copy
    on another host meets those with which it shares experts."""

    config: dict[str, Any]
    executor: str | None = None
    standing: Standing | None = None
    patches: list[str] = []
    rendezvous: str = ""


class AddRequests(msgspec.Struct, tag="add", array_like=True):
    """Requests to queue, in order. `again`: after a restart; the core passes over those that it has got already."""

    requests: list[EngineRequest]
    again: bool = False


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Requests to forget; unknown ids are ignored."""

    request_ids: list[str]


class TakePart(msgspec.Struct, tag="take_part", array_like=True):
    """A copy that shares experts may have got work: all take their steps together from now on. `number`: of such messages."""

    number: int


class UtilityCall(msgspec.Struct, tag="call", array_like=True):
    """Call a method of the core that is marked as a utility; answered by a `UtilityResult` with the same `call_id`."""

    call_id: int
    utility: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End now; unfinished requests are dropped."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The core serves.

    Attributes:
        num_blocks, block_size: the KV cache's pages, and the tokens of one.
        max_model_len: tokens that a request may have, which the core chooses where the user left it open.
        max_concurrency: how many requests of that length fit into the cache at once.
        modules: what its process has imported, in that order; for a spare that shall take its place.
    """

    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    max_concurrency: float = 0.0
    modules: list[str] = []


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """One step's outputs."""

    outputs: EngineCoreOutputs


class UtilityResult(msgspec.Struct, tag="result", array_like=True):
    """A call's value, or the error's message; `refusal` is set where the caller is at fault, or there is no room."""

    call_id: int
    value: Any = None
    error: str | None = None
    refusal: Refusal | None = None

    def get(self) -> Any:
        """The value. Raises what the call raised."""
        if self.error is None:
            return self.value
        raise EngineError(self.error) if self.refusal is None else to_error(self.refusal, self.error)


def refusal_of(error: BaseException) -> Refusal | None:
    """What an error says about whose fault it is; None where it is the engine's."""
    if isinstance(error, CapacityError):
        return Refusal(is_capacity=True, retry_after=error.retry_after)
    if isinstance(error, DeadlineError):
        return Refusal(is_late=True)
    return Refusal(param=error.param) if isinstance(error, RequestError) else None


def to_error(refusal: Refusal, message: str) -> QuireError:
    """The error that `refusal_of` was asked about."""
    if refusal.is_capacity:
        return CapacityError(message, retry_after=refusal.retry_after)
    if refusal.is_late:
        return DeadlineError(message)
    return RequestError(message, param=refusal.param)


class Dead(msgspec.Struct, tag="dead", array_like=True):
    """The core's last words. `setting` is set where a configuration error ended its start; `is_gone`: its host cannot be reached
    any more, and may never come back. `is_blameless`: it was ended because another copy had ended."""

    message: str
    is_config_error: bool = False
    setting: str | None = None
    is_gone: bool = False
    is_blameless: bool = False


class Restarting(msgspec.Struct, tag="restarting", array_like=True):
    """The core's client says: it has died and is started again. What it had not answered it will not answer. `is_whole`: no other
    copy of the engine goes on meanwhile. `is_gone`: another host has to come first, for which no request shall wait."""

    message: str
    is_whole: bool = True
    is_gone: bool = False


class GivenUp(msgspec.Struct, tag="given_up", array_like=True):
    """The core's client says: the core died while this request ran alone, so it is not to be sent again.

    Attributes:
        core_ids: of its sequences that have not ended.
        message: how the core died.
    """

    core_ids: list[str]
    message: str


class Restarted(msgspec.Struct, tag="restarted", array_like=True):
    """A new core serves, which knows of no request: all that are unfinished are to be sent again, or, where it is one of several
    copies, those with the core's ids `core_ids`."""

    core_ids: list[str] | None = None


class Stalled(msgspec.Struct, tag="stalled", array_like=True):
    """The core's client says: the core makes no progress, for this reason; where the text is empty: it goes on after all."""

    message: str


FrontendMessage = Start | AddRequests | AbortRequests | TakePart | UtilityCall | Shutdown
CoreMessage = Ready | Outputs | UtilityResult | Standing | Dead | Restarting | GivenUp | Restarted | Stalled


@functools.cache
def decoder_at_core() -> Callable[[bytes], FrontendMessage]:
    """Reads frontends' messages."""
    return decoder(FrontendMessage)


@functools.cache
def decoder_at_frontend() -> Callable[[bytes], CoreMessage]:
    """Reads a core's messages."""
    return decoder(CoreMessage)


def zmq_socket(context: Any, kind: int, address: str, *, bind: bool, linger_ms: int = 0) -> Any:
    """A socket that keeps whatever is sent until it is read, however much that is."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = linger_ms
    (socket.bind if bind else socket.connect)(address)
    return socket
