"""Drawn cases of what stands around a step's model: unpacking, and everything from logits to tokens.

Legend: S rows that sample, V vocabulary, X slots, C tokens that a slot has seen.
"""

from typing import Any

import numpy as np
import torch

from quire.conformance.cases import packets
from quire.conformance.cases.case import Case, Shapes, draw, empty, normal


@draw("unpack_step")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    numbers, groups = np.random.default_rng(rng.randrange(10**6)), rng.choice((1, 2, 3))
    tokens, requests = rng.choice((0, 1, 40, 300)), rng.randint(0, packets.MAX_ROWS)
    packet = packets.make_packet(numbers, tokens, requests, rng.randint(0, requests), rng.choice((0, 1, 150)), groups)
    bounds = rng.randint(max(tokens, 1), packets.MAX_TOKENS), rng.randint(max(requests, 1), packets.MAX_ROWS)
    return Case([packets.poisoned(packet, groups), *bounds], (0,), torch.float32, exact=True)


@draw("keep_tokens")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    s, most = rng.choice((1, 5, 300)), 400
    tokens = torch.randint(0, 10**5, (s,), dtype=torch.int32)
    rows = torch.randperm(most)[:s].int()
    return Case([tokens, rows, torch.zeros(most + 1, dtype=torch.int32)], (2,), torch.float32, exact=True)


def _logits(rng: Shapes) -> torch.Tensor:
    sizes = (rng.of((1, 5, 33), (1, 3)), rng.of((384, 5003, 151936), (384, 700)))
    logits = normal(*sizes, scale=rng.choice((0.5, 3.0)))
    logits[:, rng.randrange(300)] = -torch.inf
    return logits


def _drawing(s: int, rng: Shapes) -> list[torch.Tensor]:
    """Inverse temperatures, seeds, positions."""
    inverse = torch.rand(s) * 3 + 0.2
    inverse[:: rng.choice((2, 3))] = torch.inf
    return [inverse, torch.randint(-(2**62), 2**62, (s,)), torch.randint(0, 100000, (s,))]


@draw("argmax")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    return Case([logits, torch.zeros(len(logits), dtype=torch.int32)], (1,), torch.float32, exact=True)


@draw("gumbel_argmax")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    out = torch.zeros(len(logits), dtype=torch.int32)
    return Case([logits, *_drawing(len(logits), rng), out], (4,), torch.float32, exact=True)


@draw("filtered_gumbel_argmax")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s = len(logits)
    inverse, seed, position = _drawing(s, rng)
    top_k = torch.tensor([rng.choice((0, 1, 20, 300)) for _ in range(s)], dtype=torch.int32)
    top_p = torch.tensor([rng.choice((1.0, 0.9, 0.3)) for _ in range(s)])
    min_p = torch.tensor([rng.choice((0.0, 0.05)) for _ in range(s)])
    out = [torch.zeros(s), torch.zeros(s, dtype=torch.int32)]
    return Case([logits, inverse, top_k, top_p, min_p, seed, position, *out], (8,), torch.float32, exact=True)


@draw("hide_below")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    threshold = normal(len(logits))
    threshold[0] = -torch.inf
    return Case([logits, threshold], (0,), torch.float32, exact=True)


@draw("token_logprobs")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    n, k = rng.choice((1, 4)), rng.choice((1, 6, 21))
    index = torch.randint(0, len(logits), (n,), dtype=torch.int32)
    tokens = torch.randint(300, logits.shape[1], (n,), dtype=torch.int32)
    out = [empty(n, k, dtype=torch.float32), torch.zeros(n, k, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)]
    return Case([logits, index, tokens, rng.chance(0.8), *out], (4, 5, 6), torch.float32)


def _slots(s: int, slots: int) -> torch.Tensor:
    """A slot of its own for some rows, none for others."""
    chosen = torch.full((s,), -1, dtype=torch.int32)
    count = min(s, slots)
    chosen[torch.randperm(s)[:count]] = torch.randperm(slots)[:count].int()
    return chosen


def _seen(rng: Shapes, v: int) -> list[Any]:
    """A seen table of three slots with room for more: ids, counts, sizes."""
    room = rng.of((64, 300), (40, 64))
    ids = torch.stack([torch.randperm(v)[:room] for _ in range(3)]).int()
    counts = torch.randint(0, 3, ids.shape, dtype=torch.int32)
    return [ids, counts, torch.tensor([room - 9, 0, 17], dtype=torch.int32)]


@draw("penalize")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s, v = logits.shape
    table = _seen(rng, v)
    factors = [torch.rand(s) + 0.5, normal(s), normal(s)]
    return Case([logits, _slots(s, 3), *factors, *table, int(table[2].max())], (0,), torch.float32)


@draw("count_tokens")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    s, v = rng.choice((1, 5, 33)), 2500
    table = _seen(rng, v)
    tokens = torch.randint(0, v, (s,), dtype=torch.int32)
    tokens[0] = table[0][0, 3]
    return Case([tokens, _slots(s, 3), *table], (2, 3, 4), torch.float32, exact=True)


@draw("edit_logits")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s, v = logits.shape
    ids = torch.full((3, 600), -1, dtype=torch.int32)
    count = min(520, v)
    ids[:, :count] = torch.randperm(v)[:count].int()
    until = torch.tensor([0, 7, 5, 2**31 - 1], dtype=torch.int32).repeat(3, 150)
    positions = torch.randint(0, 12, (s,), dtype=torch.int32)
    return Case([logits, _slots(s, 3), positions, ids, normal(3, 600), until], (0,), torch.float32, exact=True)


@draw("keep_allowed")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s, v = logits.shape
    allowed = torch.randint(-(2**31), 2**31, (3, -(-v // 32))).int()
    return Case([logits, _slots(s, 3), allowed], (0,), torch.float32, exact=True)


@draw("allowed_gumbel_argmax")
def _(rng: Shapes, dtype: torch.dtype) -> Case:
    logits = _logits(rng)
    s, v = logits.shape
    allowed = torch.randint(-(2**31), 2**31, (3, -(-v // 32))).int()
    arguments = [logits, _slots(s, 3), allowed, *_drawing(s, rng), torch.zeros(s, dtype=torch.int32)]
    return Case(arguments, (6,), torch.float32, exact=True)
