"""Drafts that a model makes: how many, and whether it pays to have any made.

The drafter runs in the workers, behind the step whose tokens it goes on from; what it guesses comes back with the step's result
and is there for the next plan. So a plan decides twice: which of the guesses at hand its step verifies, as for any guesses, and
how many the drafter makes behind it. Each of those costs the drafter's time, which is measured. A drafter that would not pay
makes none; one that could not pay even for requests like those before does not follow the tokens either.

Knows rows, chances and milliseconds. Knows no model.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.draft_length import LEAST_GAIN
from quire.core.draft_times import DraftCosts
from quire.core.drafting import PATIENCE, Drafting
from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.core.proposers import FIRST_CHANCE, RowGuesses
from quire.core.step import StepInFlight

NOTHING, FOLLOW = -1, 0
"""What a drafter can do behind a step, besides making guesses."""
_REST = 16
_SILENCE = 0.5


class GivenProposer:
    """What a drafter has guessed behind a row's tokens; nothing, where others have come since."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._end, self._given = -1, list[int]()

    def give(self, end: int, guess: list[int]) -> None:
        """A guess of what comes behind so many tokens."""
        self._end, self._given = end, guess

    def extend(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)

    def propose(self, most: int) -> list[int]:
        return self._given[:most] if self._end == self._num_tokens else []


class ModelDrafting(Drafting):
    """Drafts of one scheduler's steps, made by a model of the workers. Takes what `Drafting` takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._costs = DraftCosts()
        self._proposers: dict[int, GivenProposer] = {}
        self._is_off = self._has_flights = False
        self._num_looks = 0
        """Plans in which there may be guesses to verify, or to compare with what came."""
        self._rest = (0, 0)
        """Plans for which nothing is decided anew, as long as they have so many rows."""

    # Planning.

    def _must_end(self, step: SchedulerOutput) -> bool:
        return super()._must_end(step) or step.num_drafts > FOLLOW

    def join(
        self, rows: IntArray, counts: IntArray, budget: int, limit: int, has_flights: bool
    ) -> tuple[IntArray, int]:
        self._is_off, self._has_flights = self._times.is_paused or self._rests(rows), has_flights
        if has_flights or not self._num_looks:
            self.lengths.fill(0)
            self._num_without = min(self._num_without + (not has_flights), PATIENCE)
            return counts, budget
        self._num_looks -= 1
        return super().join(rows, counts, budget, limit, has_flights)

    def _is_due(self) -> bool:
        return True

    def _rests(self, rows: IntArray) -> bool:
        """Whether the drafter rests in this plan."""
        plans, num_rows = self._rest
        if not plans or num_rows != len(rows):
            return False
        self._rest = (plans - 1, num_rows)
        return True

    def ends_of_pages(self, rows: IntArray, ends: IntArray) -> IntArray:
        # The drafter writes behind the tokens, where pages are free for that.
        if self._is_off or self._kv.pool.num_free <= 4 * self._batch.num_active * self._kv.num_groups:
            return ends
        behind = np.minimum(ends + self._config.num_speculative_tokens, self._batch.limit[rows])
        return np.maximum(ends, behind)

    def launch(self, step: SchedulerOutput) -> None:
        super().launch(step)
        if self._is_off:
            return
        step.num_drafts = self._decide(step.rows)
        if self._has_flights or not step.needs_sample.any():
            step.num_drafts = min(step.num_drafts, FOLLOW)
        if step.num_drafts > FOLLOW:
            self._num_without = 0

    def look_ahead(self) -> None:
        if self._overlaps and self._num_without >= PATIENCE and not (self._times.is_paused or self._rest[0]):
            self._num_without = 0 if self._decide(self._batch.order()) > FOLLOW else PATIENCE

    def _decide(self, rows: IntArray) -> int:
        """What the drafter is to do behind a step of these rows."""
        config, model = self._config, self._cost_model
        if not config.enable_adaptive_verification:
            return config.num_speculative_tokens
        if not model.is_ready or not len(rows):
            return FOLLOW
        chances = [self._row(row).chance for row in rows.tolist()]
        gains = self._gains(rows, np.array(chances))
        if gains.max() >= LEAST_GAIN:
            return int(gains.argmax()) + 1
        usual = self._gains(rows, np.full(len(rows), self._chance))
        if usual.max() >= LEAST_GAIN:
            return FOLLOW
        self._rest = (_REST, len(rows))
        return NOTHING

    def _gains(self, rows: IntArray, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """How many times faster tokens come with one guess for each row, with two, and so on."""
        batch, model, times = self._batch, self._cost_model, self._times
        count, most = len(rows), self._config.num_speculative_tokens
        lengths = batch.length[rows].astype(np.float64)
        _, token_ms, _, pair_ms = model.coefficients
        plain_ms = model.predict(count, count, float(lengths.sum()))
        without_ms = plain_ms * times.ratio_without(count)
        guesses = np.arange(1, most + 1)
        more = np.minimum(guesses * count, self._max_drafts)
        step_ms = times.ratio(count + more) * (plain_ms + more * (token_ms + pair_ms * float(lengths.max())))
        cycle_ms = step_ms + times.gap_ms + guesses * self._costs.predict(count)
        tokens = count + np.cumsum((chances[:, None] ** guesses).sum(0))
        return tokens / count * without_ms / np.maximum(cycle_ms, 1e-9)

    def _row(self, row: int) -> RowGuesses:
        guesses = self._guesses.get(row)
        if guesses is None:
            known = int(self._batch.known[row])
            self._proposers[row] = proposer = GivenProposer(known)
            guesses = RowGuesses(proposer, self._config.num_speculative_tokens, self._chance)
            guesses.num_seen = known
            self._guesses[row] = guesses
        return guesses

    def _look_at(self, members: Iterable[int]) -> None:
        for row in members:
            guesses = self._row(row)
            token_ids = self._batch.known_since(row, guesses.num_seen, self._config.num_speculative_tokens + 1)
            while token_ids:
                guesses.take(token_ids)
                token_ids = self._batch.known_since(row, guesses.num_seen, 1 << 20)
            guesses.propose()

    # Results.

    def settle(self, flight: StepInFlight, output: ModelRunnerOutput) -> int:
        num_more, num_drafts = super().settle(flight, output), flight.step.num_drafts
        if num_drafts > FOLLOW:
            self._take_proposals(output)
            if output.draft_ms > 0.0 and not flight.num_prompt_tokens:
                self._costs.observe(len(flight.step.rows), num_drafts, output.draft_ms)
        return num_more

    def _try_again(self) -> None:
        self._costs.doubt()
        self._chance, self._rest = max(self._chance, FIRST_CHANCE), (0, 0)
        for guesses in self._guesses.values():
            guesses.chance = max(guesses.chance, FIRST_CHANCE)

    def _take_proposals(self, output: ModelRunnerOutput) -> None:
        batch, self._num_looks = self._batch, 2
        for row in output.rows.tolist():
            if not batch.accepts[row]:
                continue
            guess = output.proposals.get(row)
            if guess is None:
                self._row(row).chance *= _SILENCE
                continue
            self._row(row)
            self._proposers[row].give(int(batch.known[row]) + 1 + len(output.accepted.get(row, ())), guess)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._proposers.pop(row, None)
