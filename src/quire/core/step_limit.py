"""How large steps may be after one of them found no device memory: half as large, and by and by larger again."""

GOOD_STEPS = 64
"""Steps in a row that must succeed before the limit is doubled."""


class StepLimit:
    """The tokens that a step may have.

    Args:
        most: the configured number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_good = 0
        self.tokens = most

    def passed(self) -> None:
        """A step was computed."""
        if self.tokens < self._most:
            self._num_good += 1
            if self._num_good >= GOOD_STEPS:
                self._num_good = 0
                self.tokens = min(2 * self.tokens, self._most)

    def lost(self, num_tokens: int) -> bool:
        """A step of `num_tokens` found no memory. False where no smaller one is left to try."""
        self._num_good = 0
        self.tokens = max(min(self.tokens, num_tokens // 2), 1)
        return num_tokens > 1
