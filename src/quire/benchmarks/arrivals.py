"""When each request of a load is sent: at once, evenly, by a gamma process (Poisson among them), in bursts, on a ramp.

Knows seconds. Knows nothing of requests or servers.
"""

import argparse
import dataclasses
import math
import random
from typing import Any

from quire.engine.arg_parser import Flags, positive
from quire.errors import ConfigError

RAMPS = ("linear", "exponential")


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """How requests arrive.

    Attributes:
        rate: requests a second; infinite means all at once.
        burstiness: shape of the gamma distribution of gaps: 1 is Poisson, less comes in clusters, more is steadier,
            infinite is even.
        burst_size: requests that arrive together; bursts are then as many times rarer.
        ramp: how the rate changes from `start_rate` to `end_rate` over the requests, if it does.

    Raises:
        ConfigError: a value is not above 0, or only part of a ramp is given.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    burst_size: int = 1
    ramp: str | None = None
    start_rate: float | None = None
    end_rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("request_rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError.of(name, f"{value} must be above 0.")
        given = (self.ramp is not None, self.start_rate is not None, self.end_rate is not None)
        if any(given) and not all(given):
            message = "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps."
            raise ConfigError.of("ramp_up_strategy", message)
        if self.ramp is None:
            return
        assert self.start_rate is not None and self.end_rate is not None
        lowest = min(self.start_rate, self.end_rate)
        if lowest < 0 or (lowest == 0 and (self.ramp == "exponential" or self.end_rate == 0)):
            message = f"ramp_up_start_rps, ramp_up_end_rps: {self.start_rate} to {self.end_rate} must be above 0."
            raise ConfigError(message, setting="ramp_up_start_rps")
        if self.rate != math.inf:
            raise ConfigError.of("request_rate", f"{self.rate:g} is given, and a ramp too; leave one of them out.")

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start for each of `count` requests, ascending, the first at 0.

        Without a ramp the gaps are scaled so that their mean is `1 / rate` exactly: what is sent has the rate asked for.
        """
        if self.rate == math.inf and self.ramp is None:
            return [0.0] * count
        num_bursts = -(-count // self.burst_size)
        gaps = self._gaps(num_bursts - 1, random.Random(seed))
        times = [0.0]
        for gap in gaps:
            times.append(times[-1] + gap)
        return [times[index // self.burst_size] for index in range(count)]

    def _gaps(self, count: int, source: random.Random) -> list[float]:
        if self.burstiness == math.inf:
            gaps = [1.0] * count
        else:
            gaps = [source.gammavariate(self.burstiness, 1.0 / self.burstiness) for _ in range(count)]
        if self.ramp is not None:
            return [gap * self.burst_size / self._ramp_rate((i + 1) / count) for i, gap in enumerate(gaps)]
        mean_gap = self.burst_size / self.rate
        total = sum(gaps)
        return [gap * mean_gap * count / total for gap in gaps]

    def _ramp_rate(self, progress: float) -> float:
        """Requests a second after a share of the requests (0 to 1)."""
        assert self.start_rate is not None and self.end_rate is not None
        if self.ramp == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress


FLAGS: Flags = (
    ("--request-rate", math.inf, "requests a second (inf: all at once)"),
    ("--burstiness", 1.0, "shape of the gaps: 1 is Poisson, less comes in clusters, more is steadier, inf is even"),
    ("--burst-size", 1, "requests that arrive together"),
    ("--max-concurrency", None, "most requests at once; others wait to be sent", {"type": positive}),
    ("--ramp-up-strategy", None, "the rate changes from start to end over the requests", {"choices": RAMPS}),
    ("--ramp-up-start-rps", None, "requests a second at the start of the ramp", {"type": float}),
    ("--ramp-up-end-rps", None, "requests a second at its end", {"type": float}),
)


def from_arguments(args: argparse.Namespace) -> Arrivals:
    return Arrivals(
        rate=args.request_rate,
        burstiness=args.burstiness,
        burst_size=args.burst_size,
        ramp=args.ramp_up_strategy,
        start_rate=args.ramp_up_start_rps,
        end_rate=args.ramp_up_end_rps,
    )


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The arrival as a result file tells it (an infinite number as text, which JSON has not)."""
    figures: dict[str, Any] = {
        "request_rate": "inf" if args.request_rate == math.inf else args.request_rate,
        "burstiness": "inf" if args.burstiness == math.inf else args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.burst_size > 1:
        figures["burst_size"] = args.burst_size
    if args.ramp_up_strategy:
        figures["ramp_up_strategy"] = args.ramp_up_strategy
        figures["ramp_up_start_rps"] = args.ramp_up_start_rps
        figures["ramp_up_end_rps"] = args.ramp_up_end_rps
    return figures
