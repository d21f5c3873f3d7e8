"""Adds the scheduling policy `willow` (`--scheduling-policy willow`): shorter prompts are served first."""

from quire.core.policies import POLICIES, SchedulingPolicy
from quire.request import EngineRequest


class WillowPolicy(SchedulingPolicy):
    """Short prompts first. A prompt gains a place for every second that it came earlier, so that a long one is served, too."""

    keeps_order = False
    tokens_per_second = 1000

    def rank(self, request: EngineRequest, arrival: int) -> tuple[float, ...]:
        return (len(request.prompt_token_ids) + self.tokens_per_second * request.arrival_time, arrival)


def register() -> None:
    """Quire calls this in each of its processes."""
    POLICIES.register("willow", WillowPolicy)
