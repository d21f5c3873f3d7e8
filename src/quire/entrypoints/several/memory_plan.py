"""Who makes room for a model that is to be awake: those that were used least recently sleep, and end where that is too little.

Knows sizes and times. Knows no processes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Deed = Literal["sleep", "stop"]


@dataclasses.dataclass(frozen=True)
class Occupant:
    """A model's part of the memory.

    Attributes:
        awake, asleep: bytes that it takes then; 0 without a process.
        state: `moving`: it is being started or woken, and cannot be asked to go.
        last_used: on any clock.
    """

    name: str
    state: Literal["off", "asleep", "awake", "moving"]
    awake: int
    asleep: int
    last_used: float

    @property
    def size(self) -> int:
        """What it takes now."""
        return {"off": 0, "asleep": self.asleep, "awake": self.awake, "moving": self.awake}[self.state]


def make_room(occupants: Sequence[Occupant], wanted: Occupant, budget: int) -> list[tuple[str, Deed]] | None:
    """What has to happen so that `wanted`, one of them, can be awake; None if it can only wait for others to have moved.
    A model that is larger than the budget gets all of it."""
    others = [each for each in occupants if each.name != wanted.name]
    free = budget - wanted.awake - sum(each.size for each in others)
    deeds: list[tuple[str, Deed]] = []
    by_age = sorted((each for each in others if each.state in ("awake", "asleep")), key=lambda each: each.last_used)
    for each in by_age:
        if free < 0 and each.state == "awake" and each.asleep < each.awake:
            deeds.append((each.name, "sleep"))
            free += each.awake - each.asleep
    for each in by_age:
        if free >= 0:
            break
        left = each.asleep if each.asleep < each.awake else each.size
        if left:
            deeds = [deed for deed in deeds if deed[0] != each.name]
            deeds.append((each.name, "stop"))
            free += left
    if free < 0 and any(each.state == "moving" for each in others):
        return None
    return deeds
