"""Drawn cases of what adapters add to products. Legend as in `kernels/adapters.py`."""

import dataclasses

import torch

from quire.conformance.cases.case import Case, Shapes, draw, normal
from quire.kernels.adapters import FIELDS, GROUP, TILE, AdapterPart, AdapterRows, AdapterTable

LOST = 1 << 20
"""What stands where nothing may be read."""


@dataclasses.dataclass
class DrawnTable(AdapterTable):
    """A table whose entries follow its parts, wherever these are copied."""

    def __post_init__(self) -> None:
        there = next(part for part in self.parts if part is not None)
        self.dtype = there.down.dtype
        self.most_ranks = max(part.rank for part in self.parts if part is not None)
        self.most_adapters = len(self.parts)
        nothing = [[0] * len(FIELDS)] * self.fan
        slots = (nothing if part is None else part.entries(self.fan) for part in self.parts)
        self.entries_FL = (
            torch.tensor([entry for entries in slots for entry in entries]).T.contiguous().to(there.down.device)
        )


def _table(rng: Shapes, dtype: torch.dtype, n: int, k: int, segments: int, *, is_embedding: bool = False) -> DrawnTable:
    """Some adapters of one matrix; slot 0 and another one are empty."""
    parts: list[AdapterPart | None] = [None, None]
    for _ in range(rng.of((1, 3, 8), (1, 3))):
        rank = rng.of((1, 4, 8, 16, 17, 64, 100), (1, 8, 17))
        shape = (k, rank) if is_embedding else (segments * rank, k)
        part = AdapterPart(normal(*shape, dtype=dtype, scale=k**-0.5), normal(rank, n, dtype=dtype), 0)
        part.segments = rng.randrange(1, 1 << segments)
        if rng.chance(0.3):
            part.gain, part.shift = torch.rand(n) + 0.5, normal(n)
        parts.append(part)
    borders = [n * number // segments for number in range(segments + 1)]
    tiles = [
        (segment, first, min(TILE, borders[segment + 1] - first))
        for segment in range(segments)
        for first in range(borders[segment], borders[segment + 1], TILE)
    ]
    return DrawnTable(torch.empty(0), torch.tensor(tiles, dtype=torch.int32), segments, dtype, parts)


def _rows(rng: Shapes, t: int, num_slots: int) -> AdapterRows:
    """Rows with any adapters, some in runs, some with none; behind those of the step stands what nobody may read."""
    slots: list[int] = []
    while len(slots) < t:
        slots += [rng.randrange(num_slots)] * rng.choice((1, 1, 5, 40))
    slots = slots[:t]
    order = sorted((row for row in range(t) if slots[row]), key=lambda row: slots[row])
    groups: list[tuple[int, int, int]] = []
    for place, row in enumerate(order):
        slot, first, count = groups[-1] if groups else (0, 0, 0)
        if slot == slots[row] and count < GROUP:
            groups[-1] = (slot, first, count + 1)
        else:
            groups.append((slots[row], place, 1))
    groups += [(LOST, LOST, 0)] * (t - len(groups))
    order += [LOST] * (t - len(order))
    slots_T, order_T, groups_G3 = (torch.tensor(values, dtype=torch.int32) for values in (slots, order, groups))
    return AdapterRows(slots_T, order_T, groups_G3)


@draw("adapter_shrink")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k, segments = rng.rows(), rng.width(), rng.width(), rng.choice((1, 2, 3))
    table = _table(rng, dtype, n, k, segments)
    for part in table.parts:
        if part is not None:
            part.segments = (1 << segments) - 1
    table.__post_init__()
    out_PTH = torch.zeros(rng.choice((1, 1, 3, 16)), t, segments * 112)
    arguments = [normal(t, k, dtype=dtype), _rows(rng, t, len(table.parts)), table, out_PTH]
    return Case(arguments, (3,), dtype, rows=1)  # the first part; the others are room


@draw("adapter_lookup")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, k = rng.rows(), rng.width(), rng.width()
    table = _table(rng, dtype, n, k, 1, is_embedding=True)
    ids = torch.randint(0, k, (t,), dtype=torch.int32)
    return Case([ids, _rows(rng, t, len(table.parts)), table, torch.zeros(1, t, 112)], (3,), dtype)


@draw("adapter_expand")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    t, n, segments = rng.rows(), rng.width(), rng.choice((1, 2, 3))
    table, out = _table(rng, dtype, n, 8, segments), rng.choice((dtype, torch.float32))
    h_PTH, out_TN = normal(1, t, segments * 112), normal(t, n, dtype=out)
    return Case([h_PTH, _rows(rng, t, len(table.parts)), table, out_TN, rng.choice((1.0, 0.5))], (3,), dtype)
