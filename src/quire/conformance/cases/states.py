"""Operations with states in pages, with random constants; and the pages that their states are in.

Legend as in `kernels/recurrent.py`.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.attention.interface import AttentionMetadata
from quire.kernels.types import DeltaWeights, LruWeights, SsdWeights

PAGES_A_ROW = 24


class Pages:
    """Tables of some rows and the metadata of a step over them; `allocate` gives states filled with noise, with a rest of
    other bytes behind each."""

    def __init__(self, block_size: int, rows: int = 4, seed: int = 0, device: str = "cpu") -> None:
        count = rows * PAGES_A_ROW + 1
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.count, self.block_size, self.device = count, block_size, device
        self.metadata = AttentionMetadata(
            block_size=block_size,
            query_start=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            rows=torch.zeros(rows, dtype=torch.int32, device=device),
            block_table=order.view(rows, PAGES_A_ROW).int().to(device),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            positions=torch.zeros(1, dtype=torch.int32),
            shape=torch.zeros(4, dtype=torch.int64, device=device),
        )

    def allocate(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        page_bytes = (4 * size + 63) // 64 * 64 + 64
        raw = torch.full(
            (self.count, page_bytes), 255, dtype=torch.uint8, device=self.device
        )  # as float32: not a number
        return raw[:, : 4 * size].view(torch.float32).unflatten(1, shape)

    def fill(self, work: list[tuple[int, int, int]]) -> AttentionMetadata:
        """A step over (row, tokens computed before, tokens now)."""
        metadata, start = self.metadata, 0
        for b, (row, computed, count) in enumerate(work):
            start += count
            metadata.query_start[b + 1 :], metadata.seq_lens[b], metadata.rows[b] = start, computed + count, row
        metadata.num_tokens, metadata.num_requests = start, len(work)
        metadata.max_query_len = max(count for *_, count in work)
        metadata.shape[:2] = torch.tensor((start, len(work)))
        return metadata


class Operation:
    """One operation with random constants: `inputs` of a token (side by side in one row, at `columns`), the shape of a state
    and of an output, and how it is called.

    Args:
        sizes: heads, size of a head, size of a state; drawn where none are given, as are channels.
    """

    def __init__(
        self, name: str, seed: int, device: str = "cpu", *, sizes: tuple[int, int, int] | None = None, channels: int = 0
    ) -> None:
        draw, self.device = random.Random(seed), device
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.name = name
        self.arguments: Callable[..., tuple[Any, ...]]
        heads, size, state = sizes or draw.choice([(4, 8, 5), (2, 24, 16), (6, 70, 3)])
        shared = draw.choice([1, 2])
        channels = channels or draw.choice([5, 64, 150])
        if name == "causal_conv":
            width, gate = draw.choice([2, 3, 4, 7]), draw.choice(["identity", "silu"])
            weight, bias = normal(width, channels), draw.choice([None, normal(channels)])
            self.inputs = [(channels,)]
            self.state, self.out = (width - 1, channels), (channels,)
            self.arguments = lambda x, states, metadata, out: (x, weight, bias, gate, states, metadata, out)
        elif name == "selective_scan":
            a, d = -normal(state, channels).exp(), normal(channels)
            self.inputs = [(channels,), (channels,), (state,), (state,)]
            self.state, self.out = (state, channels), (channels,)
            self.arguments = lambda x, dt, b, c, states, metadata, out: (x, dt, b, c, a, d, states, metadata, out)
        elif name == "ssd_scan":
            limits = draw.choice([(0.0, float("inf")), (0.5, 1.0)])
            weights = SsdWeights(-normal(heads).exp(), normal(heads), normal(heads), *limits)
            self.inputs = [(heads, size), (heads,), (heads // shared, state), (heads // shared, state)]
            self.state, self.out = (heads, state, size), (heads, size)
            self.arguments = lambda x, dt, b, c, *rest: (x, dt, b, c, weights, *rest)
        elif name == "rg_lru":
            lru = LruWeights(-normal(channels).exp(), normal(channels), normal(channels))
            self.inputs = [(channels,)] * 3
            self.state, self.out = (1, channels), (channels,)
            self.arguments = lambda x, given, forget, *rest: (x, given, forget, lru, *rest)
        elif name == "wkv":
            decay, first = -normal(channels).exp(), normal(channels)
            self.inputs = [(channels,)] * 2
            self.state, self.out = (3, channels), (channels,)
            self.arguments = lambda k, v, *rest: (k, v, decay, first, *rest)
        else:
            decays = (heads, state) if name == "gated_delta_rule, by number" else (heads,)
            self.name, floor = "gated_delta_rule", draw.choice([0.0, -2.0])
            weights = DeltaWeights(-normal(heads).exp(), normal(*decays), draw.choice([1.0, 2.0]), floor)
            keys = (heads // shared, state)
            self.inputs = [keys, keys, (heads, size), decays, (heads,)]
            self.state, self.out = (heads, state, size), (heads, size)
            self.arguments = lambda q, k, v, a, b, *rest: (q, k, v, a, b, weights, *rest)
        self.widths = [torch.Size(shape).numel() for shape in self.inputs]


OPERATIONS = (
    "causal_conv",
    "selective_scan",
    "ssd_scan",
    "gated_delta_rule",
    "gated_delta_rule, by number",
    "rg_lru",
    "wkv",
)
