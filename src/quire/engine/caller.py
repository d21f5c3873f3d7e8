"""What a request may say besides its prompt and its parameters, and on whose behalf it comes.

A server's middleware sets the caller; engines read it where requests are queued, so that routes need not pass it on.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypedDict

from quire.adapters import LoRARequest
from quire.config import limits
from quire.errors import RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    Attributes:
        tenant: shares with other tenants, under the `fair` policy; `weight`: how much it gets, beside others' weights.
        deadline: seconds of `time.monotonic()`, when nobody waits for an answer any more; 0 for never.
        is_background: others go first.
        adapter: that the caller's choice of a model means.
        copy: the copy of the model that must answer; None where the engine chooses.
    """

    tenant: str = ""
    weight: float = 1.0
    deadline: float = 0.0
    is_background: bool = False
    adapter: LoRARequest | None = None
    copy: int | None = None

    def until(self, deadline: float) -> "Caller":
        """The same, with the earlier of two deadlines."""
        earlier = min(deadline or float("inf"), self.deadline or float("inf"))
        return dataclasses.replace(self, deadline=0.0 if earlier == float("inf") else earlier)


CALLER: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=Caller())  # noqa: B039 (it is frozen)


@contextlib.contextmanager
def asking(adapter: LoRARequest | None) -> Generator[None]:
    """Within this, the caller asks for an adapter; None: for what it asked for before."""
    if adapter is None:
        yield
        return
    token = CALLER.set(dataclasses.replace(CALLER.get(), adapter=adapter))
    try:
        yield
    finally:
        CALLER.reset(token)


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and its parameters. Seconds are those of `time.monotonic()`.

    `prompt_text` is the text of a prompt that is given as token ids, for the output; `trace_headers` are the caller's
    (`traceparent`, `tracestate`); `timeout` is the seconds in which it must end;
    `data_parallel_rank` names the copy of the model that must answer. Behind `resumed_token_ids`, which another engine
    made, a request with n = 1 goes on, and its first output has them. The others are vLLM's and mean something there only: they
    may be None, and `session_id` any text."""

    priority: int
    tenant: str
    tenant_weight: float
    timeout: float | None
    arrival_time: float | None
    lora_request: LoRARequest | None
    tokenization_kwargs: dict[str, Any] | None
    prompt_text: str | None
    trace_headers: Mapping[str, str] | None
    resumed_token_ids: Sequence[int]
    session_id: str | None
    data_parallel_rank: int | None
    kv_hints: Any
    reasoning_ended: bool | None
    reasoning_parser_kwargs: dict[str, Any] | None


_OPTIONS = frozenset(RequestOptions.__annotations__)
_NOT_YET = ("kv_hints", "reasoning_ended", "reasoning_parser_kwargs")


def check_options(options: RequestOptions) -> None:
    """Raises TypeError: an option does not exist.
    Raises RequestError: it is not available yet, or the timeout is no number of seconds."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"a request has no option {min(unknown)!r}; it has {', '.join(sorted(_OPTIONS))}")
    for name in _NOT_YET:
        if options.get(name) is not None:
            raise RequestError(f"{name} is not available yet: leave it out", param=name)
    if (timeout := options.get("timeout")) is not None:
        check_timeout(timeout)


def check_copy(number: int | None, num_copies: int) -> None:
    """Raises RequestError: there is no copy of the model with this number."""
    if number is not None and not 0 <= number < num_copies:
        message = (
            f"data_parallel_rank is {number}; this engine has the copies 0 to {num_copies - 1} (data_parallel_size)"
        )
        raise RequestError(message, param="data_parallel_rank")


def check_timeout(seconds: float) -> float:
    """A request's timeout. Raises RequestError: it is no such number of seconds."""
    if not 0.0 < seconds <= limits.MAX_REQUEST_TIMEOUT_S:
        message = f"timeout is {seconds}; it must be above 0 and at most {limits.MAX_REQUEST_TIMEOUT_S:.0f} (seconds)"
        raise RequestError(message, param="timeout")
    return seconds


def merge_caller(options: RequestOptions, arrival_time: float, request_timeout: float) -> Caller:
    """The caller of a request: what its options say, and for the rest the server's caller. The earliest deadline holds,
    that of the engine's `request_timeout` included."""
    caller = CALLER.get()
    for timeout in (options.get("timeout"), request_timeout):
        if timeout:
            caller = caller.until(arrival_time + timeout)
    if (copy := options.get("data_parallel_rank")) is not None:
        caller = dataclasses.replace(caller, copy=copy)
    if (adapter := options.get("lora_request")) is not None:
        caller = dataclasses.replace(caller, adapter=adapter)
    if tenant := options.get("tenant"):
        caller = dataclasses.replace(caller, tenant=tenant, weight=options.get("tenant_weight", 1.0))
    return caller
