"""How a step's tokens are divided: one for each row that decodes, the others for prompts, in order of rank.

Knows rows and lengths. Pages, and requests that wait, are the scheduler's business.
"""

import numpy as np

from quire.config import SchedulerConfig
from quire.core.cost_model import CostModel
from quire.core.encoding import Encoding
from quire.core.output import IntArray
from quire.core.policies import SchedulingPolicy
from quire.core.request_state import Request
from quire.core.running import RunningBatch
from quire.core.step import NO_ROWS, without, without_zeros
from quire.core.timelines import Timelines
from quire.core.waiting import WaitingRoom

PATIENCE_S = 1.0
"""How long a request waits in the queue so that others' steps stay short (`max_step_factor`). A longer queue means that prompts
come faster than short steps compute them: then they come first."""

GOOD_STEPS = 64
"""Steps in a row that must succeed before the limit is doubled."""


class StepLimit:
    """The tokens that a step may have: after one that found no device memory half as many, and step by step more again.

    Args:
        most: the configured number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_good = self._num_early = 0
        self.tokens = most

    def passed(self) -> None:
        """A step was computed."""
        self._num_early = max(0, self._num_early - 1)
        if self.tokens < self._most:
            self._num_good += 1
            if self._num_good >= GOOD_STEPS:
                self._num_good = 0
                self.tokens = min(2 * self.tokens, self._most)

    def lost(self, num_tokens: int, num_in_flight: int = 0) -> bool:
        """A step of `num_tokens` found no memory. False where no smaller one is left to try: not of one token, and not of an item
        that was larger than the limit. `num_in_flight`: later steps, which were planned by the limit before."""
        can_shrink = num_tokens > 1 and (num_tokens <= self.tokens or self._num_early > 0)
        self._num_good, self._num_early = 0, num_in_flight
        self.tokens = max(min(self.tokens, num_tokens // 2), 1)
        return can_shrink


class StepBudget:
    """Divides each step's tokens.

    Args:
        config: budgets.
        policy: may make a step smaller.
        batch: who runs; prompts get `min_prefill_tokens` in any step, or as many as a page has.
        cost_model: predicts steps, for `max_step_ms` and `max_step_factor`.
        timelines: are told of prompts that get nothing.

    Attributes:
        limit: the tokens that a step may have now.
        aside: prompts of background requests that sit the step out, and their tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        batch: RunningBatch,
        cost_model: CostModel,
        timelines: Timelines,
    ) -> None:
        self._policy = policy
        self._config, self._batch, self._cost_model = config, batch, cost_model
        self._timelines, self._least = timelines, config.min_prefill_tokens or batch.block_size
        self._is_patient = True
        self._guest: Request | None = None
        self._is_alone = False
        self.aside = NO_ROWS, NO_ROWS
        self.limit = StepLimit(config.max_num_batched_tokens)

    def divide(self, waiting: WaitingRoom, encoding: Encoding) -> tuple[IntArray, IntArray, int]:
        """Rows that run already, their tokens, and what is left of the budget for prompts that wait."""
        rows, counts, budget = self._divide(waiting, encoding)
        was_alone, self._is_alone, head = self._is_alone, False, waiting.next()
        self._guest = head if head is not None and not was_alone and waiting.is_crowded_out(head) else None
        if self._guest is not None and len(rows):
            left = self.limit.tokens - int(counts.sum())
            budget = max(budget, min(left, self._limit_prefill(self.limit.tokens, NO_ROWS, 0)))
        return rows, counts, budget

    def _divide(self, waiting: WaitingRoom, encoding: Encoding) -> tuple[IntArray, IntArray, int]:
        batch, limit = self._batch, self.limit.tokens
        self.aside = NO_ROWS, NO_ROWS
        budget = max(1, min(limit, self._policy.step_tokens(limit, batch.num_active)))
        if self._config.max_step_factor > 0:
            head = waiting.next()
            is_new = head is None or self._timelines.clock() - head.source.arrival_time < PATIENCE_S
            self._is_patient = self._policy.has_shares or is_new
        rows = batch.order()
        if len(rows) == 0:
            return NO_ROWS, NO_ROWS, self._limit_prefill(budget, NO_ROWS, 0)
        # Where stages compute one after another, a row waits for its token: the first stage cannot see it before the host does.
        lengths = batch.known if self._config.num_stages > 1 else batch.length
        counts = np.minimum(lengths[rows], batch.limit[rows]) - batch.computed[rows]
        if batch.num_prefilling:
            return self._divide_among_prompts(rows, counts, budget, waiting, encoding)
        rows, counts = without_zeros(rows, counts)
        most = self._most_decodes(budget)
        rows, counts = rows[:most], counts[:most]
        return rows, counts, self._limit_prefill(budget - len(rows), rows, 0) if waiting.num_queued else 0

    def _most_decodes(self, budget: int) -> int:
        """Rows that may decode in one step: a stage's share of them, so that each stage has some to compute at any time."""
        return min(budget, -(-self._batch.num_active // self._config.num_stages))

    def _divide_among_prompts(
        self, rows: IntArray, counts: IntArray, budget: int, waiting: WaitingRoom, encoding: Encoding
    ) -> tuple[IntArray, IntArray, int]:
        """Decoding rows first, one token each; prompts share what is left, in order of rank. Those of background requests sit the
        step out (`aside`) while another request waits."""
        batch = self._batch
        is_prefill = batch.computed[rows] < batch.prefill_end[rows]
        decode_rows, decode_counts = without_zeros(rows[~is_prefill], counts[~is_prefill])
        most = self._most_decodes(budget)
        decode_rows, decode_counts = decode_rows[:most], decode_counts[:most]
        rows, counts = rows[is_prefill], counts[is_prefill]
        budget = self._limit_prefill(budget - len(decode_rows), decode_rows, int(batch.computed[rows[0]]))
        if self._config.long_prefill_token_threshold > 0:
            counts = np.minimum(counts, self._config.long_prefill_token_threshold)
        head = waiting.next()
        if head is not None and not head.source.is_background:
            is_aside = np.array([batch.request(row).source.is_background for row in rows.tolist()])
            self.aside = rows[is_aside], counts[is_aside]
            counts[is_aside] = 0
        counts = encoding.share(batch, rows, counts, budget, self.most_whole(len(decode_rows)))
        if len(counts) and counts[-1] == 0:
            self._timelines.stand(batch, rows[counts == 0].tolist(), "tokens")
        rows, counts = without_zeros(rows, counts)
        budget = max(0, budget - int(counts.sum()))
        return np.concatenate([decode_rows, rows]), np.concatenate([decode_counts, counts]), budget

    def with_aside(
        self, rows: IntArray, counts: IntArray, budget: int, dropped: set[int], encoding: Encoding
    ) -> tuple[IntArray, IntArray]:
        """The step's rows with prompts that sat aside, unless they were dropped: nobody else can use the tokens that are left."""
        aside, wanted = without(*self.aside, dropped)
        aside, wanted = without_zeros(aside, encoding.share(self._batch, aside, wanted, budget))
        return np.concatenate([rows, aside]), np.concatenate([counts, wanted])

    def left(self, budget: int, request: Request) -> int:
        """Tokens that are left for others to start when this request starts in the step."""
        return 0 if request is self._guest else budget

    def gather(
        self, rows: IntArray, counts: IntArray, new_rows: IntArray, new_counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The step's rows with those that start in it. The prompt of a tenant whom another one crowds out is computed without the
        others, who sit out one step and never two in a row."""
        if self._guest is not None and self._guest.row == new_rows[0]:
            self._is_alone = True
            return new_rows, new_counts
        return np.concatenate([rows, new_rows]), np.concatenate([counts, new_counts])

    def most_whole(self, num_others: int) -> int:
        """Tokens of an item that is computed whole, beside so many others of the step: the limits on prompts are not for it."""
        return self._config.max_num_batched_tokens - num_others

    def chunk(self, num_tokens: int, budget: int) -> int:
        """How many of the tokens of a prompt that starts may be computed in a step with so much left; 0: it has to be whole."""
        threshold = self._config.long_prefill_token_threshold
        if not self._config.enable_chunked_prefill:
            return 0 if budget < num_tokens <= self.limit.tokens else min(num_tokens, budget)
        return min(num_tokens, budget, threshold if threshold > 0 else num_tokens)

    def _limit_prefill(self, budget: int, decode_rows: IntArray, context: int) -> int:
        """The prompt tokens that may join these decoding rows: within the budget, and within `max_step_ms` or, while the queue
        is short, `max_step_factor`."""
        config, model, num_decodes = self._config, self._cost_model, len(decode_rows)
        if self._policy.has_shares:  # who comes next finds no long step, however many prompts a tenant has
            num_decodes = max(num_decodes, config.max_num_seqs)
        has_factor = config.max_step_factor > 0 and num_decodes > 0 and self._is_patient
        if not config.enable_chunked_prefill or not (config.max_step_ms > 0 or has_factor):
            return budget
        attended = float(self._batch.computed[decode_rows].sum(dtype=np.int64))
        step_ms = config.max_step_ms or config.max_step_factor * model.predict(num_decodes, num_decodes, attended)
        return min(budget, max(model.tokens_within(step_ms, num_decodes, num_decodes, attended, context), self._least))
