"""What happened to each request, and what the last steps were: kept for whoever looks, see `inspection.py`.

Only changes are noted (a chunk of a prompt, a cause of waiting that is new, a preemption), never a decode step; everything
is bounded. Takes no decisions, and knows nothing of who looks.

Causes of a stall: `pages` (too few are free), `rows` (max_num_seqs run), `tokens` (the step's budget is spent), `common
prefix` (another request computes what both begin with), `sibling` (of the same request, with n > 1, computes the prompt),
`delay` (delay_factor, or the policy), `partial prefills` (max_num_partial_prefills), `whole prompt` (chunked prefill is off).
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from quire.core.request_state import Request, RequestStatus
from quire.core.request_timeline import Timeline
from quire.core.running import RunningBatch
from quire.core.step import StepInFlight

MAX_FINISHED = 512
"""Requests remembered after their end."""
MAX_FINISHED_TOKENS = 1 << 18
"""Tokens of those, together: about 10 MB."""
MAX_STEPS = 120
MAX_QUEUE_STALLS = 2048


class Timelines:
    """Everybody's timelines, the queue's stalls, and the last steps.

    Args:
        is_on: whether anything is kept.
        clock: seconds, comparable with `EngineRequest.arrival_time`.

    Attributes:
        finished: by id, the last one ended last.
        queue_stalls: time, the request at the queue's head, and why it was not admitted (None: the queue moved).
        steps: step id, when it was collected, its milliseconds and those predicted, tokens, requests, sampled tokens.
        reset_at: when the prefix cache was emptied last.
        num_prompt_tokens, num_sampled: tokens of prompts that reached their first token, and tokens sampled, since the start.
    """

    def __init__(self, is_on: bool, clock: Callable[[], float]) -> None:
        self.is_on = is_on
        self.clock = clock
        self.finished: OrderedDict[str, Timeline] = OrderedDict()
        self.queue_stalls: deque[tuple[float, str, str | None]] = deque(maxlen=MAX_QUEUE_STALLS)
        self.steps: deque[tuple[int, float, float, float, int, int, int]] = deque(maxlen=MAX_STEPS)
        self.reset_at: float | None = None
        self.num_prompt_tokens = self.num_sampled = 0
        self._num_finished_tokens = 0
        self._num_lookups = 0
        self._stalled: tuple[Request | None, str | None] = (None, None)

    def queued(self, request: Request, num_ahead: int) -> None:
        """It stands in the queue, for the first time or again."""
        if self.is_on:
            now = self.clock()
            if num_ahead == 0 and self._stalled[1] is not None:
                self._queue_moved(now, request)
            _timeline_of(request, now).add(now, "queued", {"requests_in_queue": num_ahead})

    def held(self, request: Request, cause: str, other: str) -> None:
        """It waits, outside of the queue, for what another request computes, or for what is being prepared."""
        if self.is_on:
            now = self.clock()
            _timeline_of(request, now).add(now, "stall", {"cause": cause, "request": other})

    def queue_stands(self, head: Request | None, cause: str) -> None:
        """A plan was made without the request at the queue's head."""
        if self._stalled != (head, cause) and self.is_on and head is not None:
            self._stalled = (head, cause)
            self.queue_stalls.append((self.clock(), head.request_id, cause))

    def stand(self, batch: RunningBatch, rows: Iterable[int], cause: str) -> None:
        """Rows that compute nothing in this step; those of requests that were just preempted are passed over."""
        for row in rows if self.is_on else ():
            request = batch.requests[row]
            timeline = request.timeline if request is not None else None
            if request is None or timeline is None or request.status is not RequestStatus.RUNNING:
                continue
            if timeline.stall != cause:
                timeline.add(self.clock(), "stall", {"cause": cause})
                timeline.stall = cause

    def scheduled(self, request: Request, num_hit: int, num_free_pages: int) -> None:
        """It got a row and pages."""
        now, timeline = self.clock(), request.timeline
        request.scheduled_at = request.scheduled_at or now
        if timeline is None:
            return
        if self._stalled[1] is not None:
            self._queue_moved(now, request)
        timeline.token_ids = request.token_ids
        if timeline.number is None:
            timeline.scheduled, timeline.number, timeline.num_hit = now, self._num_lookups, num_hit
            self._num_lookups += 1
        detail = {"computed_tokens": request.num_computed_tokens, "row": request.row, "free_pages": num_free_pages}
        timeline.add(now, "scheduled", detail)

    def computed(self, request: Request, start: int, end: int, began: float, step_id: int) -> None:
        """A chunk of its prompt was collected; its step was planned at `began`."""
        timeline = request.timeline
        if timeline is None:
            return
        now = self.clock()
        detail = {"from_token": start, "to_token": end, "step": step_id, "ms": round((now - began) * 1e3, 3)}
        timeline.add(began, "chunk", detail)
        if timeline.prompt_done is None and end >= timeline.num_prompt_tokens:
            timeline.prompt_done = now

    def sampled_first(self, request: Request) -> None:
        """Its first token was collected."""
        self.num_prompt_tokens += request.num_prompt_tokens
        timeline = request.timeline
        if timeline is not None and timeline.first_token is None:
            timeline.first_token = now = self.clock()
            timeline.add(now, "first_token", {})

    def preempted(self, request: Request, num_computed: int, other: Request, cause: str = "pages") -> None:
        """It gives its row and pages up, because `other` (maybe itself) needs one of them, and none is free."""
        timeline = request.timeline
        if timeline is not None:
            detail = {"cause": cause, "computed_tokens": num_computed, "for_request": other.request_id}
            timeline.add(self.clock(), "preempted", detail)

    def ended(self, request: Request, reason: str, batch: RunningBatch) -> None:
        """It has ended; its row, if it has one, is its own still."""
        timeline, request.timeline = request.timeline, None
        if timeline is None:
            return
        num_tokens = int(batch.known[request.row]) if request.row >= 0 else len(request.token_ids)
        timeline.ended = now = self.clock()
        timeline.reason, timeline.num_tokens = reason, num_tokens
        timeline.add(now, "finished", {"reason": reason, "output_tokens": num_tokens - timeline.num_prompt_tokens})
        self.finished[timeline.request_id] = timeline
        self._num_finished_tokens += num_tokens
        while len(self.finished) > MAX_FINISHED or (
            self._num_finished_tokens > MAX_FINISHED_TOKENS and len(self.finished) > 1
        ):
            self._num_finished_tokens -= self.finished.popitem(last=False)[1].num_tokens

    def stepped(self, flight: StepInFlight, step_ms: float, predicted_ms: float) -> None:
        """A step was collected."""
        self.num_sampled += flight.num_samples
        if self.is_on:
            step = flight.step
            shape = (step.total_num_tokens, len(step.rows), flight.num_samples)
            self.steps.append((step.step_id, self.clock(), step_ms, predicted_ms, *shape))

    def cache_was_reset(self) -> None:
        """No prefix can be found any more."""
        self.reset_at = self.clock()

    def _queue_moved(self, now: float, request: Request) -> None:
        self._stalled = (None, None)
        self.queue_stalls.append((now, request.request_id, None))


def _timeline_of(request: Request, now: float) -> Timeline:
    """A request's timeline, which begins now if it has none."""
    if request.timeline is None:
        given = request.source.arrival_time
        request.timeline = Timeline(
            request_id=request.request_id,
            arrived=given if 0.0 < given <= now else now,
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=request.num_prompt_tokens,
            token_ids=request.token_ids,
            reads_cache=request.reads_cache,
            salt=request.source.cache_salt,
        )
    return request.timeline
