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
    later_tokens = sum(part.num_generation_tokens for part in parts) - len(parts)
    decode = None if first is None else last - first
    return Timing(
        queue_s=_seconds(arrival, scheduled),
        prefill_s=None if scheduled is None else _seconds(scheduled, first),
        first_token_s=_seconds(arrival, first),
        decode_s=None if decode is None else round(decode, 6),
        total_s=round(last - arrival, 6),
        tokens_per_second=round(later_tokens / decode, 2) if decode and later_tokens > 0 else None,
    )


def _seconds(begin: float, end: float | None) -> float | None:
    return None if end is None else round(max(0.0, end - begin), 6)
