"""Whether pages that are elsewhere are worth fetching: how fast they have come until now, against the time that computing takes.

Knows numbers of tokens, a clock and the cost model; knows no pages.
"""

import time
from collections.abc import Callable

from quire.core.cost_model import CostModel
from quire.logger import init_logger

logger = init_logger(__name__)

SLACK_S = 0.05
"""A wait so short is no reason to compute what is there: predictions are not more exact."""
_KEEPS = 0.7
"""Of what earlier fetches told, so much counts beside a new one."""
_FORGIVES = 0.9
"""With each request that is computed instead, a slow place seems faster, until it is tried again."""


class FetchTimes:
    """Learns how long pages take, in seconds a token, and how long each fetch has taken.

    Args:
        cost_model: predicts what computing takes, once it has seen prompts; until then everything is fetched.
        most_tokens: of a step.
        clock: seconds.
    """

    def __init__(self, cost_model: CostModel, most_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost_model, self._most_tokens, self._clock = cost_model, most_tokens, clock
        self._seconds = 0.0
        self._looked = 0.0
        """When `late` was asked last: what has ended since then came at an unknown time, and no later than it is noticed."""
        self._fetches: dict[str, tuple[float, int, float]] = {}
        """Of each that runs: when it began, its tokens, and when it shall be waited for no more."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._fetches

    def pays(self, num_tokens: int, context: int) -> bool:
        """Whether so many tokens behind others are there earlier when they are fetched."""
        if self._seconds * num_tokens <= self._seconds_to_compute(num_tokens, context) + SLACK_S:
            return True
        logger.warning_once("Pages come slower than they are computed; the prompts of some requests are computed.")
        self._seconds *= _FORGIVES
        return False

    def _seconds_to_compute(self, num_tokens: int, context: int) -> float:
        if not self._cost_model.knows_prompts:
            return float("inf")
        return self._cost_model.predict_alone(num_tokens, context, 0, self._most_tokens)

    def begin(self, request_id: str, num_tokens: int, context: int) -> None:
        """A fetch begins."""
        now = self._clock()
        until = now + self._seconds_to_compute(num_tokens, context) + SLACK_S
        self._fetches[request_id] = (now, num_tokens, until)

    def end(self, request_id: str, *, has_come: bool) -> None:
        """It has ended, with pages or without. The step that ran meanwhile is not its fault."""
        began, num_tokens, _ = self._fetches.pop(request_id)
        if has_come:
            new = max(0.0, self._looked - began) / num_tokens
            self._seconds = _KEEPS * self._seconds + (1.0 - _KEEPS) * new if self._seconds else new

    def late(self) -> list[str]:
        """Requests that have waited as long as computing would have taken; each is told once."""
        now = self._looked = self._clock()
        late = [request_id for request_id, (_, _, until) in self._fetches.items() if now > until]
        for request_id in late:
            began, num_tokens, _ = self._fetches[request_id]
            self._fetches[request_id] = (began, num_tokens, float("inf"))
            self._seconds = max(self._seconds, (now - began) / num_tokens)
        return late
