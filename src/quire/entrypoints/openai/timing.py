"""A request's times, as its answer tells them.

Knows `RequestMetrics`; knows nothing of who asks.
"""

from collections.abc import Sequence

from quire.entrypoints.openai.responses import Timing
from quire.outputs import RequestMetrics


def build_timing(parts: Sequence[RequestMetrics]) -> Timing:
    """The times of a request, or of its parts (several prompts) together: from the first arrival to the last token."""
    arrival = min(part.arrival_time for part in parts)
    scheduled = min((part.scheduled_time for part in parts if part.scheduled_time), default=None)
    first = min((part.first_token_time for part in parts if part.first_token_time), default=None)
    last = max(max(part.last_token_time, part.finished_time, arrival) for part in parts)
    tokens = sum(part.num_generation_tokens for part in parts)
    timing = Timing(queue_time_ms=_milliseconds(arrival, scheduled), generation_time_ms=_milliseconds(first, last))
    timing.time_to_first_token_ms = _milliseconds(scheduled, first)
    if timing.generation_time_ms is not None and tokens > len(parts):
        timing.mean_itl_ms = round(timing.generation_time_ms * len(parts) / (tokens - len(parts)), 3)
    if scheduled is not None and last > scheduled:
        timing.tokens_per_second = round(tokens / (last - scheduled), 2)
    return timing


def _milliseconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(max(0.0, end - begin) * 1e3, 3)
