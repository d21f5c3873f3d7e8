"""Packets of steps as a runner sends them to its device. Legend as in `kernels/step.py`."""

import numpy as np
import torch

from quire.kernels import step as packets
from quire.kernels.step import HEADER, StepBuffers

MAX_TOKENS, MAX_ROWS, ROW_PAGES = 600, 40, 9


def make_packet(rng: np.random.Generator, tokens: int, requests: int, samples: int, updates: int, groups: int):
    ends = np.sort(rng.integers(0, tokens + 1, requests))
    fields = [
        rng.integers(0, MAX_ROWS, requests),
        rng.integers(1, 99, requests),
        ends,
        rng.integers(0, max(tokens, 1), samples),
        rng.permutation(MAX_ROWS)[:samples],
        rng.integers(0, 99, samples),
        rng.random(samples, dtype=np.float32).view(np.int32),
        rng.integers(-(2**31), 2**31, samples),
        rng.integers(-(2**31), 2**31, samples),
        rng.integers(0, 50, samples),
        rng.random(samples, dtype=np.float32).view(np.int32),
        rng.random(samples, dtype=np.float32).view(np.int32),
        rng.integers(-MAX_ROWS, 999, tokens),
        rng.integers(0, 99, tokens),
        *(rng.integers(0, 5000, tokens) for _ in range(groups)),
        rng.permutation(groups * MAX_ROWS * ROW_PAGES)[:updates],
        rng.integers(1, 77, updates),
    ]
    header = np.zeros(HEADER, dtype=np.int32)
    header[:6] = (tokens, requests, samples, rng.integers(1, 9), rng.integers(1, 99), updates)
    return np.concatenate([header, *fields]).astype(np.int32)


def poisoned(packet: np.ndarray, groups: int) -> StepBuffers:
    buffers = packets.allocate(MAX_TOKENS, MAX_ROWS, groups, ROW_PAGES, 200, torch.device("cpu"))
    for name, tensor in [*vars(buffers).items(), *vars(buffers.columns).items()]:
        if isinstance(tensor, torch.Tensor) and name not in ("packet", "tables_GRP", "last_token_R"):
            tensor.fill_(77)
    buffers.packet[: len(packet)] = torch.from_numpy(packet)
    buffers.last_token_R[:] = torch.arange(MAX_ROWS + 1) + 1000
    return buffers
