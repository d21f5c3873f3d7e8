"""A request as the scheduler sees it: its tokens, limits, pages and place in its life.

Plain state, no decisions. While a request owns a row, its lengths live in `running.RunningBatch`, and its newest tokens
may still be in that row's tail; `token_ids` holds what was flushed.
"""

import enum
from typing import Any

from quire.core.output import TokenLogprobs
from quire.core.repetition import RepetitionWatch
from quire.core.request_timeline import Timeline
from quire.request import EngineRequest, TokenIds, token_array


class RequestStatus(enum.IntEnum):
    """Where a request is in its life.

    WAITING: in the queue. HELD: waits for another to compute what their prompts have in common, or for its form. RUNNING: owns
    a row and is scheduled. PREEMPTING: gives its row back as soon as no step in flight names it. ENDING: has ended, but a step in
    flight still names its row. ENDED: owns nothing.
    """

    WAITING = 0
    HELD = 1
    RUNNING = 2
    PREEMPTING = 3
    ENDING = 4
    ENDED = 5


class Request:
    """One sequence.

    Args:
        source: what the frontend sent.
        arrival: counts admitted requests; the earlier one keeps its place before the later one for life.
        max_model_len: the engine's limit on tokens.

    Attributes:
        token_ids: what is known and flushed. Only read until it gets a row, and a list of its own from then on.
        max_total: tokens, prompt included, at which it ends.
        min_total: tokens, prompt included, before which nothing but `max_total` ends it.
        eos_ids, stop_ids: what ends it; the second are reported as its stop reason.
        repetition: looks for an output that repeats itself, where that ends it.
        adapter_slot: where the workers have its adapter, from its start on; 0 without one.
        awaits_pages: a connector has pages of it, which are to be fetched before it starts.
        rank: position in the order of precedence; lower is served first and gives way last.
        block_ids: page ids by KV group, in order of position; 0 where pages are behind the window.
        num_released: by KV group, how many leading pages were given back already.
        host_block_ids: host pages of a swapped request, for the device pages that they restore.
        hashes: names of its full pages, as far as they are computed; num_published of them are findable.
        was_lost: a step of it was lost, so that nothing since the last whole page can be trusted.
        tells_more: each of its tokens is more than itself: it has logprobs, or may be one repetition too many.
        scheduled_at: when it got a row for the first time, in seconds; 0 before.
        timeline: what happened to it, where that is kept.
        transfer_params: where a connector keeps its pages for another engine; None: nowhere.
    """

    __slots__ = (
        "adapter_slot",
        "arrival",
        "awaits_pages",
        "block_ids",
        "cost",
        "eos_ids",
        "has_reported",
        "hashes",
        "host_block_ids",
        "max_total",
        "min_total",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_released",
        "page_marks",
        "prompt_logprobs",
        "publishes",
        "rank",
        "reads_cache",
        "repetition",
        "request_id",
        "root_hash",
        "row",
        "scheduled_at",
        "source",
        "status",
        "stop_ids",
        "tells_more",
        "timeline",
        "token_ids",
        "transfer_params",
        "wants_prompt_logprobs",
        "was_lost",
    )

    def __init__(self, source: EngineRequest, arrival: int, max_model_len: int) -> None:
        params = source.sampling_params
        self.source = source
        self.request_id = source.request_id
        self.arrival = arrival
        self.rank: tuple[float, ...] = (source.is_background, -1 if source.is_continuation else arrival)
        resumed = source.resumed_token_ids
        self.token_ids: TokenIds = (
            source.prompt_token_ids + token_array(resumed) if resumed else source.prompt_token_ids
        )
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_total = compute_max_total(source, max_model_len)
        # A row with a form draws an end before `min_tokens` only where its form is complete: then it ends.
        has_form = params is not None and params.structured_outputs is not None
        self.min_total = self.num_prompt_tokens + (params.min_tokens if params and not has_form else 0)
        self.eos_ids = frozenset(params.eos_token_ids) if params and not params.ignore_eos else frozenset[int]()
        self.stop_ids = frozenset(params.stop_token_ids or ()) if params else frozenset[int]()
        watched = params.repetition_detection if params else None
        self.repetition = RepetitionWatch(watched, resumed) if watched is not None and watched.is_on else None
        self.wants_prompt_logprobs = params is not None and params.prompt_logprobs is not None
        self.tells_more = params is not None and (params.logprobs is not None or self.repetition is not None)
        skips = params is not None and params.skip_reading_prefix_cache
        if source.pooling_params is not None:  # its frontend knows whether all tokens have to be computed
            skips = source.pooling_params.skip_reading_prefix_cache is not False
        self.reads_cache = not skips and not self.wants_prompt_logprobs
        self.publishes = True
        self.status = RequestStatus.WAITING
        self.row = -1
        self.adapter_slot = 0
        self.awaits_pages = False
        self.transfer_params: dict[str, Any] | None = None
        self.cost = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.has_reported = False
        self.was_lost = False
        self.block_ids: list[list[int]] = []
        self.num_released: list[int] = []
        self.host_block_ids: list[list[int]] = []
        self.root_hash: bytes | None = None
        self.hashes: list[bytes] = []
        self.page_marks: dict[int, bytes] | None = None
        self.num_published = 0
        self.prompt_logprobs: TokenLogprobs | None = None
        self.scheduled_at = 0.0
        self.timeline: Timeline | None = None

    @property
    def is_swapped(self) -> bool:
        """Whether its computed tokens wait in host memory."""
        return bool(self.host_block_ids)

    def repeats(self, token_ids: list[int], length: int) -> bool:
        """Take note of tokens that brought it to this length: whether its output ends with them, because it repeats itself."""
        watch = self.repetition
        if watch is None:
            return False
        found = [watch.add(token_id) for token_id in token_ids]
        return any(found) and length >= self.min_total

    def marks(self, block_size: int) -> dict[int, bytes]:
        """By page, which media it has, and where these begin."""
        if self.page_marks is None:
            self.page_marks = {}
            for item in self.source.media:
                for page in range(item.offset // block_size, (item.end - 1) // block_size + 1):
                    mark = f"{item.key}@{item.offset - page * block_size};".encode()
                    self.page_marks[page] = self.page_marks.get(page, b"") + mark
        return self.page_marks

    @property
    def may_draft(self) -> bool:
        """Whether its tokens may be guessed. One that looks for repetitions ends at a token that only it knows."""
        return self.source.sampling_params is not None and self.repetition is None

    @property
    def is_pooling(self) -> bool:
        """Whether it asks for a vector instead of tokens."""
        return self.source.pooling_params is not None


def compute_max_total(source: EngineRequest, max_model_len: int) -> int:
    """The length, prompt included, at which a request ends by LENGTH. A pooling request ends after its prompt."""
    num_prompt_tokens = len(source.prompt_token_ids)
    if source.sampling_params is None:
        return num_prompt_tokens + 1
    if source.sampling_params.max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + source.sampling_params.max_tokens, max_model_len)
