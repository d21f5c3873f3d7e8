"""A histogram that costs a binary search an observation, and may be told of many equal observations at once.

Knows numbers. Knows nothing of Prometheus' text format or of what is measured.
"""

import bisect
from collections.abc import Sequence


class Histogram:
    """Counts of observations at or below each bound.

    Args:
        bounds: upper bounds in ascending order; one above the last (infinity) is always there.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError("bounds must ascend")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """How many observations there are."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of bound (as Prometheus writes it) and observations at or below it."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return rows


def steps_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    bounds: list[float] = []
    decade = 1
    while True:
        for factor in (1, 2, 5):
            if decade * factor > limit:
                return bounds
            bounds.append(float(decade * factor))
        decade *= 10
