"""What an observer is shown of a scheduler, as plain data: its state now, one request's timeline, and where a prompt left the
prefix cache and why.

Computed when somebody asks, from the notes in `timelines.py`. Changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from quire.core.common_prefix import count_equal_pages
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request_state import Request, RequestStatus
from quire.core.request_timeline import Event, Timeline
from quire.core.running import RunningBatch
from quire.core.timelines import Timelines
from quire.request import SchedulerStats

MAX_LIVE = 100
MAX_FINISHED = 50
_QUIET_S = 2.0
"""Without a step for this long, nothing is being generated."""


class Inspection:
    """One scheduler's state, for an observer.

    Args:
        stats: the scheduler's figures of now.
        requests: those that have not ended, by id, oldest first.
    """

    def __init__(
        self,
        stats: Callable[[], SchedulerStats],
        requests: Mapping[str, Request],
        batch: RunningBatch,
        kv: KVCacheManager,
        timelines: Timelines,
    ) -> None:
        self._stats = stats
        self._requests = requests
        self._batch = batch
        self._kv = kv
        self._timelines = timelines

    def state(self) -> dict[str, Any]:
        """The state now: figures, the last steps, live requests (the oldest), finished ones (the newest first)."""
        now, stats, timelines = self._timelines.clock(), self._stats(), self._timelines
        steps = [
            {
                "id": step_id,
                "age_s": round(now - collected, 4),
                "ms": round(ms, 3),
                "predicted_ms": round(predicted, 3),
                "num_tokens": tokens,
                "num_requests": rows,
                "num_generated": samples,
            }
            for step_id, collected, ms, predicted, tokens, rows, samples in timelines.steps
        ]
        live = [_live(request, self._batch, now) for request in islice(self._requests.values(), MAX_LIVE)]
        finished = islice(reversed(timelines.finished.values()), MAX_FINISHED)
        total = stats.num_total_blocks
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_usage": round(1.0 - stats.num_free_blocks / total, 6) if total else 0.0,
            "num_pages": total,
            "free_pages": stats.num_free_blocks,
            "prefix_queries": stats.prefix_cache_queries,
            "prefix_hits": stats.prefix_cache_hits,
            "preemptions": stats.num_preemptions,
            "prompt_tokens_total": timelines.num_prompt_tokens,
            "generation_tokens_total": timelines.num_sampled + stats.num_jumped_tokens,
            "tokens_per_second": _tokens_per_second(timelines, now),
            "step": steps[-1] if steps else None,
            "steps": steps,
            "requests": live,
            "finished": [_finished(timeline, now) for timeline in finished],
        }

    def adapters(self) -> tuple[list[str], list[str]]:
        """The names of adapters that requests run with, and wait to run with."""
        running, waiting = set[str](), set[str]()
        for request in self._requests.values():
            if request.source.adapter is not None:
                (running if request.row >= 0 else waiting).add(request.source.adapter.lora_name)
        return sorted(running), sorted(waiting)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """The timeline of the request with this id, or of the last one whose id holds it as a whole word, with the ids of its
        siblings; None for one that is not remembered."""
        timelines, kv = self._timelines, self._kv
        known = [request.timeline for request in self._requests.values() if request.timeline is not None]
        every = [*timelines.finished.values(), *known]
        found = [one for one in every if one.request_id == request_id]
        found = found or [one for one in every if _holds_word(one.request_id, request_id)]
        if not found:
            return None
        timeline, now = found[-1], timelines.clock()
        events = _with_decoding(timeline, [*timeline.events, *_queue_stalls(timeline, timelines, now)], now)
        shown: list[dict[str, Any]] = []
        for index, (at, kind, detail) in enumerate(events):
            if kind == "stall":  # it lasts until whatever happens next
                end = events[index + 1][0] if index + 1 < len(events) else now
                detail = {**detail, "s": round(max(0.0, end - at), 6)}
            shown.append({"t_s": round(at - timeline.arrived, 6), "kind": kind, "detail": detail})
        return {
            "id": timeline.request_id,
            "siblings": [other.request_id for other in found if other is not timeline],
            "is_finished": timeline.ended is not None,
            "arrived_ago_s": round(now - timeline.arrived, 6),
            "events": shown,
            "events_left_out": timeline.num_dropped,
            "prefix": explain_prefix(
                timeline, every, kv.block_size, caches=kv.has_prefix_cache, reset_at=timelines.reset_at
            ),
        }


def _tokens_per_second(timelines: Timelines, now: float) -> float:
    steps = timelines.steps
    if len(steps) < 2 or now - steps[-1][1] > _QUIET_S:
        return 0.0
    begin = steps[0][1]
    seconds = steps[-1][1] - begin
    generated = sum(step[-1] for step in steps if step[1] > begin)
    return round(generated / seconds, 2) if seconds > 0 else 0.0


_STATES = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.HELD: "held",
    RequestStatus.PREEMPTING: "preempted",
    RequestStatus.ENDING: "ending",
    RequestStatus.ENDED: "ended",
}


def _live(request: Request, batch: RunningBatch, now: float) -> dict[str, Any]:
    row, timeline = request.row, request.timeline
    known = int(batch.known[row]) if row >= 0 else len(request.token_ids)
    computed = int(batch.collected[row]) if row >= 0 else request.num_computed_tokens
    state = _STATES.get(request.status)
    if state is None:
        state = "decode" if computed >= int(batch.prefill_end[row]) else "prefill"
    shown = {
        "id": request.request_id,
        "state": state,
        "prompt_tokens": request.num_prompt_tokens,
        "computed_tokens": computed,
        "output_tokens": known - request.num_prompt_tokens,
        "cached_tokens": max(0, request.num_cached_tokens),
    }
    if request.source.adapter is not None:
        shown["adapter"] = request.source.adapter.lora_name
    return shown | (_pace(timeline, known - request.num_prompt_tokens, now) if timeline is not None else {})


def _finished(timeline: Timeline, now: float) -> dict[str, Any]:
    output_tokens = timeline.num_tokens - timeline.num_prompt_tokens
    return {
        "id": timeline.request_id,
        "state": "finished",
        "reason": timeline.reason,
        "prompt_tokens": timeline.num_prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": timeline.num_hit,
    } | _pace(timeline, output_tokens, now)


def _pace(timeline: Timeline, output_tokens: int, now: float) -> dict[str, Any]:
    """Times in seconds: since it came, in the queue, to the first token, in all; and tokens a second since the first token."""
    end = timeline.ended if timeline.ended is not None else now
    first, scheduled = timeline.first_token, timeline.scheduled
    decoding = end - first if first is not None else 0.0
    return {
        "age_s": round(now - timeline.arrived, 3),
        "queued_s": round((scheduled if scheduled is not None else end) - timeline.arrived, 6),
        "first_token_s": None if first is None else round(first - timeline.arrived, 6),
        "total_s": round(end - timeline.arrived, 6),
        "tokens_per_second": round((output_tokens - 1) / decoding, 2) if output_tokens > 1 and decoding > 0 else 0.0,
    }


def _holds_word(text: str, word: str) -> bool:
    at = text.find(word)
    return (
        bool(word)
        and at >= 0
        and not text[at - 1 : at].isalnum()
        and not text[at + len(word) : at + len(word) + 1].isalnum()
    )


def _with_decoding(timeline: Timeline, events: list[Event], now: float) -> list[Event]:
    """The events in order of time, and one for all decode steps."""
    first, ended, more = timeline.first_token, timeline.ended, timeline.num_tokens - timeline.num_prompt_tokens - 1
    if first is not None and (ended is None or more > 0):
        seconds = (now if ended is None else ended) - first
        detail = {"s": round(seconds, 6)}
        if ended is not None:
            detail |= {"tokens": more, "tokens_per_second": round(more / seconds, 2) if seconds > 0 else 0.0}
        events.append((first, "decode", detail))
    return sorted(events, key=lambda event: event[0])


def _queue_stalls(timeline: Timeline, timelines: Timelines, now: float) -> list[Event]:
    """Why it was not admitted while it stood in the queue: its own hindrance at the head, or that of those before it."""
    begin: float | None = None
    stalls: list[Event] = []
    for at, kind, _ in [*timeline.events, (timeline.ended if timeline.ended is not None else now, "end", {})]:
        if kind == "queued":
            begin = at
        elif begin is not None:
            stalls += _stalls_between(timeline.request_id, timelines, begin, at)
            begin = None
    return stalls


def _stalls_between(request_id: str, timelines: Timelines, begin: float, end: float) -> list[Event]:
    stalls: list[Event] = []
    for at, head, cause in timelines.queue_stalls:
        if at >= end:
            break
        if at <= begin:
            stalls.clear()  # what was the matter when it came is the last entry before
        if cause is None:
            continue
        at = max(at, begin)
        detail: dict[str, Any] = {"cause": cause} if head == request_id else {"cause": cause, "behind": head}
        if stalls and "behind" in stalls[-1][2] and "behind" in detail and stalls[-1][2]["cause"] == cause:
            stalls[-1][2]["behind"] = head  # the last one that stood before it
        else:
            stalls.append((at, "stall", detail))
    return stalls


def explain_prefix(
    timeline: Timeline, others: Iterable[Timeline], block_size: int, *, caches: bool, reset_at: float | None
) -> dict[str, Any]:
    """Where a prompt left the prefix cache, and why: compared with the prompts that are remembered and were looked up before.

    `why` is one of: not looked up yet, cache off, not read, shorter than a page, nothing left, never seen, differs, evicted,
    still computed, cache reset, cache salt differs. `request` and `common_tokens` name the prompt that came nearest.
    """
    length, hit = timeline.num_prompt_tokens, timeline.num_hit
    told: dict[str, Any] = {"prompt_tokens": length, "hit_tokens": hit, "left_at_token": hit}

    def because(why: str, explanation: str, nearest: Timeline | None = None, common: int = 0) -> dict[str, Any]:
        told.update(why=why, explanation=explanation)
        if nearest is not None:
            told.update(request=nearest.request_id, common_tokens=common)
        return told

    if not caches:
        return because("cache off", "the prefix cache is off (enable_prefix_caching)")
    if not timeline.reads_cache:
        return because("not read", "the request does not read the cache (prompt logprobs, pooling, or as it asked)")
    if timeline.number is None:
        return because("not looked up yet", "the request waits")
    limit = (length - 1) // block_size * block_size
    if hit and hit >= limit:
        return because("nothing left", "every full page that the cache could give was found")
    if limit == 0:
        return because("shorter than a page", f"a page has {block_size} tokens, and the last token is always computed")
    before = [other for other in others if other.number is not None and other.number < timeline.number]
    nearest, common = _nearest(timeline, [other for other in before if other.salt == timeline.salt])
    if nearest is not None and min(common, len(nearest.token_ids) - 1, limit) // block_size * block_size > hit:
        return because(*_why_gone(timeline, nearest, reset_at), nearest, common)
    stranger, shared = _nearest(timeline, [other for other in before if other.salt != timeline.salt])
    if stranger is not None and min(shared, limit) // block_size * block_size > hit:
        return because(
            "cache salt differs",
            f"request {stranger.request_id} begins with the same {shared} tokens under another cache salt or adapter",
            stranger,
            shared,
        )
    if nearest is None or common == 0:
        return because("never seen", "no prompt that is remembered begins like this one")
    ends = " (it has no more tokens)" if common == len(nearest.token_ids) else ""
    sentence = f"differs from request {nearest.request_id} after token {common}{ends}; pages have {block_size} tokens"
    return because("differs", sentence, nearest, common)


def _why_gone(timeline: Timeline, nearest: Timeline, reset_at: float | None) -> tuple[str, str]:
    """Why pages that `nearest` computes could not be found."""
    looked_up, seen = timeline.scheduled or 0.0, nearest.scheduled or 0.0
    if nearest.prompt_done is None or nearest.prompt_done > looked_up:
        return "still computed", f"request {nearest.request_id} was still computing these pages"
    if reset_at is not None and seen <= reset_at <= looked_up:
        return "cache reset", "the prefix cache was emptied in between"
    return "evicted", f"request {nearest.request_id} had these pages; they were given to others since, or not kept"


def _nearest(timeline: Timeline, others: list[Timeline]) -> tuple[Timeline | None, int]:
    """Which of them has the longest beginning in common with a prompt; the latest of equals."""
    best: Timeline | None = None
    longest = 0
    for other in reversed(others):
        if best is not None and other.token_ids[longest : longest + 1] != timeline.token_ids[longest : longest + 1]:
            continue  # it cannot be longer; prompts that share a beginning are many
        common = count_common(timeline.token_ids, other.token_ids, timeline.num_prompt_tokens)
        if best is None or common > longest:
            best, longest = other, common
            if longest == timeline.num_prompt_tokens:
                break
    return best, longest


def count_common(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """In how many leading tokens two sequences agree, at most `limit`."""
    return count_equal_pages(one, other, 1, 0, min(len(one), len(other), limit))
