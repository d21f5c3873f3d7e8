"""What speculation costs, and whether it has paid: how long steps with drafts and a drafter's guesses take, and an account of it.

The account is kept in steps: a step that gave three times as many tokens and took twice as long is one to the good. What has been
gained may be lost again, and `GIVEN` beyond that; then there are no drafts for a hundred times as many steps. So speculation
that does not pay costs no more than a hundredth, however wrong predictions are. After the same time without drafts, whatever the
reason, they are tried again, and all that had been learned of them is doubted; later and later as long as trying does not pay.

Knows numbers alone.
"""

import numpy as np
import numpy.typing as npt

GIVEN = 3.0
"""Steps that may be lost before anything was gained."""
_WORTH = 1.3
_MOST_GAINED = 32.0
_FIRST_REST, _LONGEST_REST = 300, 2400
_CLEAR, _COMPARISONS = 1.25, (16, 128)
"""After so many steps with drafts there is one without, to compare with: where they gain less than this, and where more."""
_LEARNING = 0.2


def worth(num_rows: int) -> float:
    """How many times more a step with drafts must give for its time: a request whose own are wrong, or that has none, waits for
    those of the others and gets nothing for it."""
    return _WORTH if num_rows > 1 else 1.0


class DraftTimes:
    """How long steps take compared with what the cost model says, those with drafts and those without, and the account.

    Attributes:
        balance: steps that speculation may lose yet. is_paused: they are lost, and there are no drafts for a while.
        gap_ms: how long the device has nothing to do around a step with drafts, where it works beside the host.
    """

    def __init__(self) -> None:
        self._with, self._without = np.ones(32, dtype=np.float64), np.ones(32, dtype=np.float64)
        self.balance, self.is_paused = GIVEN, False
        self._num_rested, self._rest = 0, _FIRST_REST
        self._num_with, self._gain = 0, 1.0
        self.gap_ms = 0.0

    def ratio(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What a prediction for steps with drafts of so many tokens is to be multiplied with."""
        return self._with[np.frexp(num_tokens)[1]]

    def ratio_without(self, num_tokens: int) -> float:
        """What a prediction for a step without drafts of so many tokens is to be multiplied with."""
        return float(self._without[num_tokens.bit_length()])

    def observe(self, num_tokens: int, step_ms: float, predicted_ms: float, *, has_drafts: bool) -> None:
        """A step took so long."""
        self._num_with = self._num_with + 1 if has_drafts else 0
        if step_ms > 0.0 and predicted_ms > 0.0:
            ratios, size = self._with if has_drafts else self._without, num_tokens.bit_length()
            ratio = min(max(step_ms / predicted_ms, 0.25), 4.0)
            ratios[size] += _LEARNING * (ratio - ratios[size])

    def observe_gap(self, gap_ms: float) -> float:
        """The device stood still for so long. Returns what counts of it: a machine may have been busy with something else."""
        gap_ms = max(0.0, gap_ms)
        self.gap_ms += _LEARNING * (gap_ms - self.gap_ms)
        return min(gap_ms, 4.0 * self.gap_ms)

    def book(self, gain: float, took: float) -> None:
        """A step with drafts gave so many steps' tokens, and took as long as so many steps without drafts."""
        self._num_rested = 0
        self._gain += 0.1 * (gain / took - self._gain)
        self.balance = min(self.balance + gain - took, _MOST_GAINED)
        self.is_paused = self.balance < 0.0

    def charge(self, steps: float) -> None:
        """A step without drafts was waited for, so that the next could have some: that took so many steps' time."""
        self.balance -= steps
        self.is_paused = self.balance < 0.0

    def wants_comparison(self) -> bool:
        """Whether it was long ago that a step had no drafts."""
        return self._num_with >= _COMPARISONS[self._gain > _CLEAR]

    def rest(self) -> bool:
        """A step had no drafts. Returns whether they are to be tried again."""
        self._num_rested += 1
        if self._num_rested < self._rest:
            return False
        self._rest = _FIRST_REST if self.balance > GIVEN else min(2 * self._rest, _LONGEST_REST)
        self._num_rested, self.is_paused, self.balance = 0, False, max(self.balance, GIVEN)
        self._with += 0.5 * (self._without - self._with)
        self.gap_ms *= 0.5
        return True


class DraftCosts:
    """How long a drafter takes for one guess of each row, by the rows' number in powers of two."""

    def __init__(self) -> None:
        self._ms = np.zeros(32, dtype=np.float64)

    def observe(self, num_rows: int, num_drafts: int, draft_ms: float) -> None:
        """It took so long."""
        size, each = num_rows.bit_length(), draft_ms / num_drafts
        known = self._ms[size]
        self._ms[size] = known + _LEARNING * (min(each, 4.0 * known) - known) if known else each

    def predict(self, num_rows: int) -> float:
        """Milliseconds a guess; of sizes that never came, those of the next smaller one that did, and 0 where there is none."""
        known = self._ms[: num_rows.bit_length() + 1].nonzero()[0]
        return float(self._ms[known[-1]]) if len(known) else 0.0

    def doubt(self) -> None:
        """The machine may have been busy when they were measured."""
        self._ms *= 0.5
