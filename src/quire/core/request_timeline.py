"""One request's life as a list of events: plain data, which `timelines.py` writes and `inspection.py` shows."""

import dataclasses
from typing import Any

from quire.request import TokenIds

MAX_EVENTS = 256
"""Events kept of a request: the first half of them, and the last."""

Event = tuple[float, str, dict[str, Any]]
"""Seconds of the clock, the kind of event, and what there is to know."""


@dataclasses.dataclass(slots=True)
class Timeline:
    """One request's life. Times are the clock's seconds; None where the moment has not come.

    Attributes:
        arrived: when the frontend got it, or when it was queued, where the frontend does not say.
        token_ids: its tokens, the prompt first. A list that the request goes on to fill.
        prompt_done: when the last chunk of its prompt was collected.
        number: counts lookups in the prefix cache; None before the first.
        num_hit: tokens that the first lookup found.
        num_dropped: events that were left out of the middle.
        stall: the cause that it waits for since its last event.
    """

    request_id: str
    arrived: float
    num_prompt_tokens: int
    num_tokens: int
    token_ids: TokenIds
    reads_cache: bool
    salt: str | None
    scheduled: float | None = None
    first_token: float | None = None
    prompt_done: float | None = None
    ended: float | None = None
    reason: str = ""
    number: int | None = None
    num_hit: int = 0
    events: list[Event] = dataclasses.field(default_factory=list[Event])
    num_dropped: int = 0
    stall: str | None = None

    def add(self, now: float, kind: str, detail: dict[str, Any]) -> None:
        """Note an event."""
        if len(self.events) >= MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.num_dropped += 1
        self.events.append((now, kind, detail))
        self.stall = None
