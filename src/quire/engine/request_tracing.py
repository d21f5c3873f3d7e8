"""From requests' records to spans: attributes, the caller's trace, and the timeline as events.

A span is built when its request has ended, on the event loop, after the core was asked for the timeline; it is sent elsewhere.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire.engine.request_state import RequestRecord, SequenceState
from quire.errors import QuireError
from quire.metrics.engine_metrics import FinishedRequest
from quire.metrics.spans import TRACE_HEADERS, RequestSpan, SpanWriter

_MAX_PARENTS = 1 << 16
"""Callers' traces kept for requests that run; beyond it the oldest are forgotten."""

Timeline = dict[str, Any]


class RequestTracing:
    """Follows requests and writes a span for each.

    Args:
        model_name: in every span.
        timeline: asks the core what happened to a request of its own.
    """

    def __init__(
        self, writer: SpanWriter, model_name: str, timeline: Callable[[str], Awaitable[Timeline | None]]
    ) -> None:
        self._writer = writer
        self._model_name = model_name
        self._timeline = timeline
        self._parents: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def received(self, record: RequestRecord) -> None:
        """A request was queued, in the context of the HTTP request that it came with."""
        parent = TRACE_HEADERS.get()
        if parent is not None:
            self._parents[record.request_id] = parent
            if len(self._parents) > _MAX_PARENTS:
                self._parents.popitem(last=False)

    def ended(self, record: RequestRecord, sequence: SequenceState, finished: FinishedRequest) -> None:
        """A sequence has ended; a request ends with its last one."""
        del sequence
        if record.num_unfinished:
            return
        span = build_span(record, finished, self._model_name, self._parents.pop(record.request_id, None))
        try:
            task = asyncio.get_running_loop().create_task(self._write(span, record.sequences[0].core_id))
        except RuntimeError:  # no loop runs any more
            self._writer.write(span)
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, span: RequestSpan, core_id: str) -> None:
        try:
            add_timeline(span, await self._timeline(core_id))
        except QuireError:  # the engine died: the span tells what is known here
            pass
        finally:
            self._writer.write(span)

    def shutdown(self) -> None:
        """Send what is left."""
        self._writer.shutdown()


def build_span(
    record: RequestRecord, finished: FinishedRequest, model_name: str, parent: Mapping[str, str] | None
) -> RequestSpan:
    """The span of a request that has just ended, without its timeline."""
    now, params = time.time(), record.params
    elapsed = finished.end_to_end or 0.0
    firsts = [one.first_token_time for one in record.sequences if one.first_token_time]
    first = min(firsts) - record.arrival_time if firsts else None
    scheduled = finished.scheduled
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(record.sequences),
        "gen_ai.usage.prompt_tokens": len(record.prompt_token_ids),
        "gen_ai.usage.completion_tokens": sum(len(one.token_ids) for one in record.sequences),
        "gen_ai.usage.cached_tokens": record.num_cached_tokens,
        "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in record.sequences],
        "gen_ai.latency.time_in_queue": scheduled,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.e2e": elapsed,
        "gen_ai.latency.time_in_model_prefill": None if first is None or scheduled is None else first - scheduled,
        "gen_ai.latency.time_in_model_decode": None if first is None else elapsed - first,
        "gen_ai.latency.time_in_model_inference": None if scheduled is None else elapsed - scheduled,
    }
    begin = int((now - elapsed) * 1e9)
    return RequestSpan(begin, int(now * 1e9), attributes, [], parent, record.error)


def add_timeline(span: RequestSpan, timeline: Timeline | None) -> None:
    """What the core knows: events, and where the prompt left the prefix cache."""
    if timeline is None:
        return
    for event in timeline["events"]:
        at = min(max(span.begin_ns + int(event["t_s"] * 1e9), span.begin_ns), span.end_ns)
        span.events.append((at, event["kind"], event["detail"]))
    prefix = timeline["prefix"]
    span.attributes["quire.prefix.hit_tokens"] = prefix["hit_tokens"]
    span.attributes["quire.prefix.why"] = prefix["why"]
