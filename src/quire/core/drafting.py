"""Speculation, as far as plans are concerned: which guesses (drafts) a step verifies, and what its result means for the rows.

A draft is a token that is scheduled but not known. A step computes a row's last token and its drafts, and draws behind each
of them; a draft that equals the draw before it was right, and the next draw counts too. What was wrong is computed again: the
row's lengths are set back. A row has no other step in flight meanwhile: it is not known where that would begin. So a step with
drafts is planned when nothing is in flight, and nothing is planned beside it.

Layers with a state keep that of before the step, not one for each draft. So behind a wrong draft a row is set back to where the
step began, and computes with its next step what was right once more, and further drafts with it.

Knows rows, tokens and the cost of steps. Where guesses come from is a `Proposer`'s business.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quire.config.speculative import SUFFIX_METHODS, SpeculativeConfig
from quire.core.cost_model import CostModel
from quire.core.draft_length import choose_lengths
from quire.core.draft_times import DraftTimes, worth
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.core.proposers import FIRST_CHANCE, NgramProposer, Proposer, RepeatingProposer, RowGuesses
from quire.core.request_state import Request
from quire.core.running import RunningBatch
from quire.core.step import StepInFlight
from quire.core.step_stats import DraftCounts
from quire.core.suffix_texts import SharedTexts, SuffixProposer

MAX_INDEXED = 4096
"""Tokens of a prompt that are read at a time, so that a long prompt holds up no step."""
MOST_AGAIN = 16
"""Tokens of a row with states that a step with drafts computes again; where more have come together it has no drafts, and the
state after them is kept."""
MOST_KEPT = 16
"""Rows with states that have drafts in a step: a copy of each one's is kept meanwhile."""
PATIENCE = 4
"""Rows of plans without a draft after which steps overlap again, and guesses are looked at once in `_STRIDE` plans."""
_STRIDE = 4


class NoDrafting:
    """Steps have no drafts."""

    def waits(self, flights: Sequence[StepInFlight]) -> bool:
        """Whether the next plan has to wait for what is in flight."""
        return False

    def join(
        self, rows: IntArray, counts: IntArray, budget: int, limit: int, has_flights: bool
    ) -> tuple[IntArray, int]:
        """The tokens of each row with its drafts, and what is left of the budget for prompts that wait. The step may have `limit`
        tokens."""
        return counts, budget

    def look_ahead(self) -> None:
        """The device works on a step."""

    def known_ends(self, rows: IntArray, ends: IntArray) -> IntArray:
        """Where rows' tokens end in the step that is being planned, without drafts."""
        return ends

    def ends_of_pages(self, rows: IntArray, ends: IntArray) -> IntArray:
        """Up to where rows need pages whose tokens end there in the step that is being planned."""
        return ends

    def launch(self, step: SchedulerOutput) -> None:
        """The step is in flight."""

    def settle(self, flight: StepInFlight, output: ModelRunnerOutput) -> int:
        """A step was collected: set rows with drafts back to what was right of them. Returns how many were right."""
        return 0

    def ended(self, row: int) -> None:
        """The row's request has come to its end; it keeps the row until no step in flight names it."""

    def forget(self, row: int) -> None:
        """The row has no owner any more."""


class Drafting(NoDrafting):
    """Drafts of one scheduler's steps.

    Args:
        config: how many guesses, and of whom.
        batch: who runs.
        kv: pages.
        cost_model: predicts steps.
        counts: are told what came of drafts.
        max_drafts: guesses that a step may have in all.
        overlaps: steps without drafts overlap.
        make_proposer: of a request; by default as `config` says.
        clock: seconds, as the scheduler's.

    Attributes:
        lengths: by row, the drafts of the step that is being planned.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        batch: RunningBatch,
        kv: KVCacheManager,
        cost_model: CostModel,
        counts: DraftCounts,
        max_drafts: int,
        *,
        overlaps: bool = False,
        make_proposer: Callable[[Request], Proposer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._batch, self._kv, self._cost_model = config, batch, kv, cost_model
        self._max_drafts, self._overlaps, self._clock = max_drafts, overlaps, clock
        self._make_proposer = make_proposer or self._default_proposer
        self._guesses: dict[int, RowGuesses] = {}
        self._texts: SharedTexts | None = None
        if config.method in SUFFIX_METHODS:
            self._texts = SharedTexts(config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth)
        self._chance = FIRST_CHANCE
        self._times = DraftTimes()
        self._num_without = self._num_skipped = 0
        self._settled_at, self._was_waited_for, self._last_waited = clock(), False, -1
        self._without = (0.0, 0)
        """Of the step with drafts that is planned or in flight: its milliseconds and its tokens if it had none."""
        self.lengths: IntArray = np.zeros(len(batch.requests), dtype=np.int32)
        self.counts = counts

    def _default_proposer(self, request: Request) -> Proposer:
        config, source = self._config, request.source
        if config.is_synthetic:
            return RepeatingProposer()
        if self._texts is not None:  # with a salt of its own a request does not show by its speed what others got
            return SuffixProposer(config, None if source.cache_salt else self._texts, request.num_prompt_tokens)
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)

    # Planning.

    def waits(self, flights: Sequence[StepInFlight]) -> bool:
        if flights:
            self._was_waited_for = self._must_end(flights[-1].step)
        return bool(flights) and self._was_waited_for

    def _must_end(self, step: SchedulerOutput) -> bool:
        """Whether no plan is made beside this step: it has drafts, or the next one is to have some."""
        return bool(step.drafts) or self._num_without < PATIENCE

    def join(
        self, rows: IntArray, counts: IntArray, budget: int, limit: int, has_flights: bool
    ) -> tuple[IntArray, int]:
        self.lengths.fill(0)
        if has_flights or not len(rows) or self._times.is_paused or not self._is_due():
            return counts, budget
        if self._times.wants_comparison() and self._config.enable_adaptive_verification:
            return counts, budget
        members = self._members(rows, counts)
        self._look_at(members)
        lengths = self._choose(rows, counts, members, limit - int(counts.sum()))
        self._num_without = 0 if any(lengths) else min(self._num_without + max(len(members), 1), PATIENCE)
        self.lengths[members] = lengths
        return counts + self.lengths[rows], budget - sum(lengths)

    def _is_due(self) -> bool:
        """Whether guesses are looked at in this plan: where none pays, a row's last few tokens can be read together."""
        if self._num_without < PATIENCE or not self._config.enable_adaptive_verification:
            return True
        self._num_skipped = (self._num_skipped + 1) % _STRIDE
        return not self._num_skipped

    def known_ends(self, rows: IntArray, ends: IntArray) -> IntArray:
        return ends - self.lengths[rows]

    def look_ahead(self) -> None:
        # Whether the next step should have some, the one in flight having none.
        if not self._overlaps or self._num_without < PATIENCE or self._times.is_paused or not self._is_due():
            return
        rows = self._batch.order()
        ones = np.ones(len(rows), dtype=np.int32)
        members = self._members(rows, ones, in_flight=True)
        self._look_at(members)
        if any(self._choose(rows, ones, members, self._max_drafts)):
            self._num_without = 0

    def launch(self, step: SchedulerOutput) -> None:
        lengths = self.lengths[step.rows]
        if self._was_waited_for or lengths.any():
            self._last_waited = step.step_id
        if not lengths.any():
            return
        for index in lengths.nonzero()[0].tolist():
            row = int(step.rows[index])
            step.drafts[row] = self._guesses[row].guess[: int(lengths[index])]
        self._batch.length[step.rows] += lengths

    def _members(self, rows: IntArray, counts: IntArray, *, in_flight: bool = False) -> list[int]:
        """The rows that decode and can have drafts: all of their tokens are known, but for those in flight."""
        batch = self._batch
        decodes = (counts == 1) & (batch.computed[rows] >= batch.prefill_end[rows])
        if self._kv.has_states:
            decodes |= (counts <= MOST_AGAIN) & (batch.computed[rows] + counts == batch.length[rows])
        if not in_flight:
            decodes &= batch.known[rows] == batch.length[rows]
        requests = [batch.request(row) for row in rows[decodes].tolist()]
        members = [request.row for request in requests if request.may_draft and request.has_reported]
        return members[:MOST_KEPT] if self._kv.has_states else members

    def _look_at(self, members: Iterable[int]) -> None:
        """Give each row's new tokens to its proposer, and have it guess."""
        batch = self._batch
        for row in members:
            guesses = self._guesses.get(row)
            if guesses is None:
                proposer = self._make_proposer(batch.request(row))
                guesses = RowGuesses(proposer, self._config.num_speculative_tokens, self._chance)
                self._guesses[row] = guesses
            token_ids = batch.known_since(row, guesses.num_seen, MAX_INDEXED)
            if token_ids or not guesses.num_seen:
                guesses.take(token_ids)
                if guesses.num_seen == batch.known[row]:
                    guesses.propose()

    def _choose(self, rows: IntArray, counts: IntArray, members: list[int], room: int) -> list[int]:
        """How many guesses of each member are verified."""
        if not members:
            return []
        batch = self._batch
        room = min(room, self._max_drafts)
        counts_of = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        most = [self._most(row, counts_of[row], len(self._guesses[row].guess)) for row in members]
        if not any(most) or room <= 0:
            return [0] * len(members)
        if not self._config.enable_adaptive_verification:
            return _first(most, room)
        ends = batch.computed[rows] + counts
        total, attended = int(counts.sum()), float(np.dot(counts.astype(np.float64), ends))
        model = self._cost_model
        if not model.is_ready:
            return [0] * len(members)
        step_ms = model.predict(total, len(rows), attended)
        _, token_ms, _, pair_ms = model.coefficients
        more = np.arange(1, min(room, sum(most)) + 1)
        more_ms = (token_ms + pair_ms * float(ends.max())) * (2 if self._kv.has_states else 1)  # a wrong one, once more
        times = self._times
        with_ms = worth(len(rows)) * (times.ratio(total + more) * (step_ms + more * more_ms) + times.gap_ms)
        num_tokens = int(np.count_nonzero(ends == batch.length[rows]))
        num_again = sum(counts_of[row] - 1 for row in members)  # are due to earlier drafts
        without_ms = model.predict(total - num_again, len(rows), attended)
        self._without = (without_ms * times.ratio_without(total - num_again), num_tokens)
        chance_NK = self._chances(members, max(most))
        return choose_lengths(chance_NK, most, len(more), num_tokens, step_ms * times.ratio_without(total), with_ms)

    def _chances(self, members: list[int], width: int) -> npt.NDArray[np.float64]:
        """How likely the guesses of each member are right, each together with all before it."""
        chance_NK = np.ones((len(members), width), dtype=np.float64)
        if self._config.is_synthetic:
            chance_NK *= self._config.synthetic_rates()[:width]
        for number, row in enumerate(members if not self._config.is_synthetic else ()):
            shares = self._guesses[row].shares
            chance_NK[number, : len(shares)] = shares[:width]
            chance_NK[number] *= self._guesses[row].chance
        return np.minimum(chance_NK, 1.0).cumprod(axis=1, dtype=np.float64)

    def _most(self, row: int, count: int, num_guessed: int) -> int:
        """Guesses of a row that fit behind its own tokens: within its limit, and into pages that are free beside a reserve for
        others."""
        batch = self._batch
        end = int(batch.computed[row]) + count
        most = min(num_guessed, int(batch.limit[row]) - end)
        if self._kv.pool.num_free < self._batch.num_active * self._kv.num_groups * 2 + most:
            most = min(most, int(batch.capacity[row]) - end)
        return max(most, 0)

    # Results.

    def settle(self, flight: StepInFlight, output: ModelRunnerOutput) -> int:
        num_more = self._take_back(flight.step, output) if flight.step.drafts else 0
        if output.step_ms > 0.0 and self._cost_model.is_ready and self._config.enable_adaptive_verification:
            self._account(flight, output, num_more)
        self._settled_at = self._clock()
        return num_more

    def _take_back(self, step: SchedulerOutput, output: ModelRunnerOutput) -> int:
        """Set rows back to what was right of their drafts; how many were."""
        num_more = 0
        counts_of = dict(zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True))
        for row, drafts in step.drafts.items():
            num_accepted = len(output.accepted.get(row, ()))
            num_wrong = len(drafts) - num_accepted
            self._batch.set_back(row, num_wrong)
            if num_wrong and self._kv.has_states:
                self._batch.recompute(row, counts_of[row] - num_wrong)
            self.counts.add(len(drafts), num_accepted)
            num_more += num_accepted
        return num_more

    def _account(self, flight: StepInFlight, output: ModelRunnerOutput, num_more: int) -> None:
        """What the step gave and what it cost, beside a step without drafts."""
        times, step, took_ms = self._times, flight.step, output.step_ms + output.draft_ms
        without_ms, num_tokens = self._without if step.drafts else (flight.predicted_ms, 1)
        if not flight.num_prompt_tokens:
            times.observe(step.total_num_tokens, output.step_ms, flight.predicted_ms, has_drafts=bool(step.drafts))
        gap_ms = times.gap_ms if step.drafts else 0.0
        if self._overlaps and step.step_id == self._last_waited and not flight.num_prompt_tokens:
            gap_ms = (self._clock() - self._settled_at) * 1e3 - output.step_ms - output.draft_ms
            gap_ms = times.observe_gap(min(gap_ms, 4.0 * output.step_ms))  # an engine may have been paused
        if step.drafts or output.draft_ms:
            if step.drafts:
                took_ms = min(took_ms, 4.0 * flight.predicted_ms + output.draft_ms) + gap_ms
                took_ms *= worth(len(step.rows))
            else:  # a drafter has worked behind the step
                without_ms = output.step_ms
            if without_ms > 0.0 and num_tokens:
                times.book(1.0 + num_more / num_tokens, took_ms / without_ms)
        else:
            times.charge(gap_ms / output.step_ms)
            if times.rest():
                self._try_again()
        if times.is_paused:
            self._num_without = PATIENCE

    def _try_again(self) -> None:
        """It was long ago that drafts were tried: what is known of them may be out of date."""

    def ended(self, row: int) -> None:
        guesses = self._guesses.get(row)
        if guesses is not None and self._texts is not None:
            guesses.end(self._batch.known_since(row, guesses.num_seen, MAX_INDEXED))

    def forget(self, row: int) -> None:
        self.lengths[row] = 0  # another request may get the row in the plan that is being made
        guesses = self._guesses.pop(row, None)
        if guesses is not None:
            self._chance += 0.2 * (guesses.chance - self._chance)


def _first(most: Sequence[int], room: int) -> list[int]:
    """All guesses, one row after the other, as long as there is room."""
    lengths: list[int] = []
    for count in most:
        lengths.append(min(count, room))
        room -= lengths[-1]
    return lengths
