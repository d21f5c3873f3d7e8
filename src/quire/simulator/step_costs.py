"""What a step costs, in milliseconds, from its shape: fitted from measured steps, or estimated from a device's data sheet.

Knows numbers of tokens, sequences and attended pairs. Knows no scheduler and no clock.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from quire.errors import ConfigError

GB = 1e9
STEADY = ((1.0,),)
"""The scatter of steps that take what is predicted."""
T = TypeVar("T")


def of_size(some: Sequence[T], tokens: int) -> T:
    """What holds for a step of so many tokens, of things for 0, 1, 2 to 3, 4 to 7 … tokens; the last one is for more, too."""
    return some[min(tokens.bit_length(), len(some) - 1)]


class StepCosts(Protocol):
    """Predicts steps. Attributes: scatter: by what factors steps differ from their predictions, one after the other and over and
    over; for steps of 0, 1, 2 to 3, 4 to 7 … tokens, and the last ones for more, too."""

    @property
    def scatter(self) -> Sequence[Sequence[float]]: ...

    @property
    def told(self) -> Sequence[float]:
        """The share of a step's time that its scheduler is told, by tokens as `scatter`: the host's part is not in it."""
        ...

    def step_ms(self, tokens: int, sequences: int, attended: float) -> float:
        """Milliseconds of a step; `attended` counts pairs of a token and one of its context."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the result's file."""
        ...


@dataclasses.dataclass(frozen=True)
class FittedCosts:
    """The cost model's linear form, with coefficients that were fitted (`core/cost_model.py`), and what it does not say.

    Attributes:
        base, token, sequence, pair: milliseconds of a step, a token, a sequence, an attended pair.
        bends: factors for steps of 0, 1, 2 to 3, 4 to 7 … tokens; the last one is for more, too.
        scatter: for steps of as many tokens each, measured over predicted in the order in which they were measured: a slow moment
            of a machine lasts for many steps, which no single draw would show.
        told: the share that the scheduler is told of such a turn, by which it divides prompts.
    """

    base: float
    token: float
    sequence: float
    pair: float
    bends: tuple[float, ...] = (1.0,)
    scatter: tuple[tuple[float, ...], ...] = STEADY
    told: tuple[float, ...] = (1.0,)

    def step_ms(self, tokens: int, sequences: int, attended: float) -> float:
        line = self.base + self.token * tokens + self.sequence * sequences + self.pair * attended
        return line * of_size(self.bends, tokens)

    def describe(self) -> dict[str, Any]:
        return {"kind": "fitted", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's data sheet. Attributes: memory in bytes; bandwidth in bytes a second; flops of dense bfloat16 a second."""

    memory: float
    bandwidth: float
    flops: float


DEVICES: Mapping[str, Device] = {
    "a100": Device(80 * GB, 2.04e12, 312e12),
    "l40s": Device(48 * GB, 0.864e12, 362e12),
    "h100": Device(80 * GB, 3.35e12, 989e12),
    "h200": Device(141 * GB, 4.8e12, 989e12),
    "b200": Device(180 * GB, 7.7e12, 2250e12),
    "mi300x": Device(192 * GB, 5.3e12, 1307e12),
}
"""Devices by name, as their makers describe them (SXM and OAM modules where there are several)."""

BANDWIDTH_SHARE = 0.83
FLOPS_SHARE = 0.6
STEP_MS = 0.2
SEQUENCE_MS = 0.02
"""What is reached of a data sheet, and what a step and a sequence cost besides. The bandwidth's share and the two times are such
that the shape of Llama-3.1-8B takes 3.98 ms a step alone and 4.87 ms in a batch of 32, as measured on an H200
(docs/parallelism.md); the flops' share is a round number for large matrices."""


@dataclasses.dataclass(frozen=True)
class EstimatedCosts:
    """A roofline: the slower of reading memory and computing, and a little for each step and sequence.

    Attributes:
        weight_bytes: read by every step.
        parameters: used by every token.
        kv_bytes: of one token, read once for each sequence that has it in its context.
        pair_flops: of attention, for a token and one of its context.
    """

    device: Device
    weight_bytes: float
    parameters: float
    kv_bytes: float
    pair_flops: float

    @property
    def scatter(self) -> tuple[tuple[float, ...], ...]:
        return STEADY

    @property
    def told(self) -> tuple[float, ...]:
        return (1.0,)

    def step_ms(self, tokens: int, sequences: int, attended: float) -> float:
        context = attended / max(1, tokens) * sequences
        reading = (self.weight_bytes + self.kv_bytes * context) / (self.device.bandwidth * BANDWIDTH_SHARE)
        flops = 2 * self.parameters * tokens + self.pair_flops * attended
        computing = flops / (self.device.flops * FLOPS_SHARE)
        return 1e3 * max(reading, computing) + STEP_MS + SEQUENCE_MS * sequences

    def describe(self) -> dict[str, Any]:
        return {"kind": "estimated", **dataclasses.asdict(self)}


def read_costs(path: str) -> FittedCosts:
    """The coefficients of a file that `quire simulate --save-costs` wrote. Raises ConfigError: it has none."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        line = [float(values[name]) for name in ("base", "token", "sequence", "pair")]
        bends, told = (tuple(map(float, values.get(name, [1.0]))) for name in ("bends", "told"))
        scatter = tuple(tuple(map(float, some)) for some in values.get("scatter", STEADY))
        costs = FittedCosts(*line, bends=bends, scatter=scatter, told=told)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = (
            f"{path!r} is no file of costs ({error}): write one with quire simulate --device here --save-costs FILE"
        )
        raise ConfigError.of("costs", message) from None
    if (
        min([*line, *bends, *told, *itertools.chain(*scatter)]) < 0
        or sum(line[:3]) <= 0
        or not (bends and told and scatter and all(scatter))
    ):
        raise ConfigError.of("costs", f"{path!r} has costs below 0, or none at all: {line}")
    return costs
