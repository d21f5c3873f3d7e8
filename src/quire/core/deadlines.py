"""Requests whose deadline cannot be met any more: no work is spent on them.

Looks at the request that is about to start, when it is known what the prefix cache saves it. Those that run out of time in the
queue or while they run are aborted by their frontend. Knows clocks and predictions; ends nothing itself.
"""

from collections.abc import Callable

from quire.core.cost_model import CostModel
from quire.core.request_state import Request


class Deadlines:
    """Finds requests that are too late.

    Args:
        cost_model: predicts what a request takes at least.
        max_num_batched_tokens: tokens of a step.
        clock: seconds, comparable with `EngineRequest.deadline`.
    """

    def __init__(self, cost_model: CostModel, max_num_batched_tokens: int, clock: Callable[[], float]) -> None:
        self._cost_model, self._max_num_batched_tokens, self._clock = cost_model, max_num_batched_tokens, clock

    def why_missed(self, request: Request, num_computed: int) -> str:
        """Why it cannot meet its deadline, of whose tokens so many need not be computed; empty where it can."""
        deadline = request.source.deadline
        if not deadline:
            return ""
        length = len(request.token_ids)
        num_outputs = max(1, request.min_total - length)
        needed = self._cost_model.predict_alone(
            length - num_computed, num_computed, num_outputs, self._max_num_batched_tokens
        )
        left = max(0.0, deadline - self._clock())
        if needed < left:
            return ""
        return f"{left:.3g} s are left of the request's timeout, and it is predicted to take {needed:.3g} s at least"
