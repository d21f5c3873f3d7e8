"""One rank of a group that computes several models together: a process of the tests beside this file.

It is told its rank, the group's size, where the ranks meet, and a JSON file with the models' folders by name; it writes the
logprobs of every prompt position, and the greedy tokens after it, to `rank<r>.npz` beside that file.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.operations import COMPOSED

from quire.distributed.communicator import Communicator
from quire.distributed.gloo import GlooGroup
from quire.kernels import ops, registry
from quire.platforms.cpu import CpuPlatform

PROMPT = [(17 * i * i + 5 * i + 3) % 300 + 3 for i in range(41)]
CHUNK = 13
NEW_TOKENS = 5


def select_kernels(kernels: str) -> None:
    """`native`, `reference`, or `fused`: references in the order in which a GPU has layers computed."""
    if kernels == "native":
        CpuPlatform().select_kernels()
        return
    ops.select("any")
    if kernels == "fused":
        choices = ops.choices()
        for op in COMPOSED:
            own = dataclasses.replace(choices[op].chosen, platform="cuda")
            choices[op] = dataclasses.replace(choices[op], chosen=own)
        registry.use(choices)


def compute(
    path: Path, communicator: Communicator | None, expert_parallel: bool = False
) -> tuple[np.ndarray, list[int]]:
    """Logprobs [tokens, V] of the prompt, in chunks beside another request, and the tokens after it."""
    driver = ModelDriver(build_tiny(path, communicator=communicator, expert_parallel=expert_parallel))
    sequence, other = Sequence(list(PROMPT), row=2), Sequence(PROMPT[::-1][:20], row=1)
    pieces = [driver.step([(other, 20), (sequence, CHUNK)])[1]]
    pieces.append(driver.prefill(sequence, CHUNK))
    first = int(pieces[-1][-1].argmax())
    sequence.token_ids.append(first)
    return torch.cat(pieces).numpy(), [first, *driver.generate(sequence, NEW_TOKENS)]


def main(rank: int, size: int, address: str, models_file: Path, kernels: str, experts: str = "split") -> None:
    torch.set_num_threads(1)
    select_kernels(kernels)
    group = GlooGroup(rank, size, address)
    results: dict[str, np.ndarray] = {}
    for name, path in json.loads(models_file.read_text()).items():
        logprobs, tokens = compute(Path(path), group, experts == "whole")
        results[f"{name}/logprobs"], results[f"{name}/tokens"] = logprobs, np.array(tokens)
    np.savez(models_file.parent / f"rank{rank}.npz", **results)
    group.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
