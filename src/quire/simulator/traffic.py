"""The requests of a simulation: when each comes, how long its prompt and its answer are, and which beginning it shares.

Traces are JSON lines. Knows token ids and seconds; prompts are made when they are asked for, so that a million need no memory.
"""

import dataclasses
import json
import random
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from quire.errors import ConfigError, refusing
from quire.request import EngineRequest, TokenIds
from quire.sampling_params import SamplingParams

PIECE_TOKENS = 512
"""Tokens of one entry of `hash_ids`, in traces that have them."""
_FIRST_TOKEN, _LAST_TOKEN = 10, 30_000


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        seconds: from the start.
        prompt_tokens, output_tokens: its lengths.
        pieces: names of the prompt's beginning, each of `piece_tokens` tokens; requests with equal names share them.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[int, ...] = ()
    piece_tokens: int = PIECE_TOKENS

    def prompt(self, number: int) -> TokenIds:
        """Its token ids: those of its pieces, then random ones of its own."""
        parts = [_random_tokens((1, piece), self.piece_tokens) for piece in self.pieces]
        own = self.prompt_tokens - sum(map(len, parts))
        if own > 0:
            parts.append(_random_tokens((2, number), own))
        return array("i", b"".join(part.tobytes() for part in parts)[: 4 * self.prompt_tokens])

    def request(self, number: int) -> EngineRequest:
        """As the engine gets it."""
        params = SamplingParams(max_tokens=self.output_tokens, ignore_eos=True, detokenize=False)
        return EngineRequest(str(number), self.prompt(number), params, arrival_time=self.seconds)


def _random_tokens(seed: tuple[int, int], count: int) -> Any:
    generator = np.random.Generator(np.random.SFC64(seed))
    return generator.integers(_FIRST_TOKEN, _LAST_TOKEN, count, dtype=np.int32)


def poisson(
    rate: float, count: int, prompt_tokens: int, output_tokens: int, *, seed: int = 0, spread: float = 0.5
) -> Iterator[Arrival]:
    """Requests that come independently, `rate` a second; lengths vary evenly by the share `spread` either way."""
    source = random.Random(seed)
    now = 0.0
    for _ in range(count):
        yield Arrival(now, _around(source, prompt_tokens, spread), _around(source, output_tokens, spread))
        now += source.expovariate(rate)


def _around(source: random.Random, mean: int, spread: float) -> int:
    return max(1, source.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))


def read_trace(path: str, speed: float = 1.0) -> list[Arrival]:
    """A trace: one JSON object a line, with `timestamp` (milliseconds), `input_length` and `output_length`, and maybe `hash_ids`,
    the names of the prompt's pieces of 512 tokens.

    Args:
        speed: how much faster than recorded the requests come.

    Raises:
        ConfigError: it cannot be read, with the line at fault.
    """
    arrivals: list[Arrival] = []
    with (
        refusing(OSError, setting="trace", what=f"trace: {path!r} cannot be read"),
        open(path, encoding="utf-8") as file,
    ):
        for number, line in enumerate(file, 1):
            if line.strip():
                arrivals.append(_read_line(line, number, speed))
    if not arrivals:
        raise ConfigError.of("trace", f"{path!r} has no request")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _read_line(line: str, number: int, speed: float) -> Arrival:
    try:
        values = json.loads(line)
        arrival = Arrival(
            float(values["timestamp"]) / 1e3 / speed,
            int(values["input_length"]),
            int(values["output_length"]),
            tuple(map(int, values.get("hash_ids", ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = '{"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [names]}'
        raise ConfigError.of("trace", f"line {number} is no request ({error!r}); a line is {wanted}") from None
    if arrival.seconds < 0 or arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        raise ConfigError.of("trace", f"line {number}: lengths must be at least 1 and the timestamp at least 0")
    return arrival


def numbered(arrivals: Iterable[Arrival]) -> Iterator[tuple[int, Arrival]]:
    """The arrivals with their numbers. Raises ConfigError: they are not in order of time."""
    last = 0.0
    for number, arrival in enumerate(arrivals):
        if arrival.seconds < last:
            raise ConfigError.of("trace", f"request {number} comes at {arrival.seconds} s, behind one of {last} s")
        last = arrival.seconds
        yield number, arrival
