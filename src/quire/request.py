"""What the frontend hands to the engine core, and what comes back: the messages of floor 4, as plain data.

All are msgspec structs, so that they travel in-process as objects and between processes as msgpack, never as pickle.
"""

import enum
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.adapters import LoRARequest
from quire.media import MediaItem
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # it cannot be indexed before Python 3.12
"""A prompt's token ids as int32. They are converted once, where a request is made: hashing, the wire between processes and the
device's inputs take the bytes as they are."""

SEED_BITS = 63
_GOLDEN = 0x9E3779B97F4A7C15
TOKEN_BYTES = array("i").itemsize
_CHUNK = 1024
_pack = struct.Struct(f"{_CHUNK}i").pack


def token_array(token_ids: Sequence[int]) -> TokenIds:
    """Token ids as an array; one that is an array already stays the same object.
    Raises TypeError: they are not whole numbers.
    Raises OverflowError: one of them does not fit in 32 bits."""
    if isinstance(token_ids, array):
        return token_ids
    packed, whole = array("i"), len(token_ids) - len(token_ids) % _CHUNK
    try:  # packing takes 7 ns a token, making an array of a list 15
        for start in range(0, whole, _CHUNK):
            packed.frombytes(_pack(*token_ids[start : start + _CHUNK]))
    except struct.error:
        return array("i", token_ids)
    packed.extend(token_ids[whole:])
    return packed


def child_seed(seed: int, index: int) -> int:
    """The seed of sibling `index`: the first keeps the request's own, others are mixed from it (SplitMix64's finaliser),
    so that the siblings of neighbouring seeds do not meet."""
    if index == 0:
        return seed & ((1 << SEED_BITS) - 1)
    mask = (1 << 64) - 1
    value = (seed + index * _GOLDEN) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & ((1 << SEED_BITS) - 1)


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the protocol's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """One sequence to generate. A user's request with n > 1 becomes n of these with the same `group_id`.

    Attributes:
        prompt_token_ids: the prompt; a list becomes an array. Never changed: siblings, frontend and core share it.
        resumed_token_ids: tokens that were emitted before a restart; they count as output, not as prompt.
        seed: always concrete; the sampler's tokens depend on (seed, position) alone.
        group_id: siblings (n > 1) share it: the scheduler lets them share the prompt's pages.
        cache_salt: keeps this request's cached pages apart from those of other salts.
        tenant: who shares with others under the `fair` policy; `tenant_weight`: how much it gets, beside others' weights.
        deadline: seconds of the same clock as `arrival_time`, when nobody waits for it any more; 0 for never.
        is_background: it runs where no other request wants to, whatever the policy: a line of a batch.
        is_continuation: it goes on with what was accepted before, so that it finds room in a full queue: a step of a beam search.
        arrival_time: seconds, `time.monotonic()` of the frontend.
        priority: lower runs earlier, under the `priority` policy.
        adapter: that its tokens are computed with.
        media: what stands in the prompt besides text, in order.
        copy: the copy of the model that must answer; None where the client of the copies chooses.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    seed: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    group_id: str | None = None
    resumed_token_ids: list[int] = []
    tenant_weight: float = 1.0
    deadline: float = 0.0
    is_background: bool = False
    is_continuation: bool = False
    adapter: LoRARequest | None = None
    media: list[MediaItem] = []
    copy: int | None = None

    def __post_init__(self) -> None:
        self.prompt_token_ids = token_array(self.prompt_token_ids)


class TokenLogprobs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Logprobs of consecutive positions of one request.

    Each position has a list of (token id, logprob) in descending logprob after its first entry, which is always the
    sampled (or prompt) token itself; `ranks` is that token's 1-based rank in the whole vocabulary.
    """

    token_ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    ranks: list[int] = []


class Pooled(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a pooling request gave: float32 numbers, as their own bytes on every border.

    Attributes:
        columns: numbers a row; 0 for one vector.
    """

    data: bytes
    columns: int = 0

    @classmethod
    def from_array(cls, values: npt.NDArray[np.float32]) -> "Pooled":
        """Of a vector, or of rows."""
        return cls(values.astype(np.float32, copy=False).tobytes(), values.shape[1] if values.ndim == 2 else 0)

    def to_array(self) -> npt.NDArray[np.float32]:
        """The numbers: [D], or [rows, D]."""
        values = np.frombuffer(bytearray(self.data), dtype=np.float32)  # a copy that its owner may write to
        return values.reshape(-1, self.columns) if self.columns else values


class Refusal(msgspec.Struct, array_like=True, omit_defaults=True):
    """What kind of error refused a request: the client's (`param` names the field), a lack of room (`is_capacity`, with the
    seconds after which to try again), or a deadline that cannot be met (`is_late`)."""

    is_capacity: bool = False
    param: str | None = None
    retry_after: float | None = None
    is_late: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What is new of one request.

    Attributes:
        num_cached_tokens, scheduled_at: with the first output only: prompt tokens that the prefix cache gave, and when the
            request left the queue, in seconds of `time.monotonic()`.
        num_preemptions: how often the request has given up its pages until now.
        kv_transfer_params: with the first output only: where its prompt's pages are, for another engine.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = -1
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    pooled: Pooled | None = None
    refusal: Refusal | None = None
    scheduled_at: float = 0.0
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class AdapterStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """What became of adapters since it was told last.

    Attributes:
        running, waiting: names of the adapters that sequences run with now, and wait to run with.
        load_seconds: of each that was loaded. num_failures: those that could not be.
        num_evictions: those that gave up their place to another one.
    """

    running: list[str] = []
    waiting: list[str] = []
    load_seconds: list[float] = []
    num_failures: int = 0
    num_evictions: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """A step's figures, for metrics and logs.

    Attributes:
        num_jumped_tokens: output tokens that no step had to sample.
        num_deferred: waiting requests that could not start even if there were room.
        num_iteration_tokens: prompt tokens that the step computed, and output tokens that it gave.
        num_drafts, num_draft_tokens: rows that verified guessed tokens, and those tokens.
        accepted_per_position: how many of them were right, by their place in the guess.
        adapters: what became of them, where that has changed.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_batched_tokens: int = 0
    step_ms: float = 0.0
    num_jumped_tokens: int = 0
    num_iteration_tokens: int = 0
    num_deferred: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = []
    adapters: AdapterStats | None = None


class WeightState(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Which weights an engine computes with.

    Attributes:
        version: what they are called.
        num_updates: how often they have changed.
        path: the folder that they were read from, if that is not the model's.
        is_sent: a trainer sent them: they are in no file.
        problem: why nothing can be computed with them, if it cannot.
    """

    version: str = "default"
    num_updates: int = 0
    path: str | None = None
    is_sent: bool = False
    problem: str | None = None


class QueueState(msgspec.Struct, array_like=True, omit_defaults=True):
    """What frontends know of the core's queue, so that they refuse what it would refuse.

    Attributes:
        max_waiting: requests with which it is full, if they are like those that wait now.
        delay: predicted seconds until the last of them starts.
        closed: tenants that have no room now; `""` stands for all of them where tenants have no shares.
    """

    max_waiting: int = 0
    delay: float = 0.0
    closed: list[str] = []


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """A step's outputs. The common case (one new token, nothing else) is in columns: `plain_ids[i]` got `plain_tokens[i]`.

    Attributes:
        weights: after these outputs the weights have changed.
        queue: of the core, where it has changed.
        engine: which of the model's copies tells; set by the client of the copies.
    """

    plain_ids: list[str] = []
    plain_tokens: list[int] = []
    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    weights: WeightState | None = None
    queue: QueueState | None = None
    engine: int = 0

    @property
    def has_content(self) -> bool:
        """Whether it tells anything."""
        told = (self.stats, self.weights, self.queue)
        return bool(self.plain_ids or self.outputs) or any(each is not None for each in told)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens in it."""
        return len(self.plain_ids) + sum(len(output.new_token_ids) for output in self.outputs)
