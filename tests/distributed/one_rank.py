"""One rank of a group that computes several models together: a process of `ranks.py`, which gives it one job after another.

A job, a line of JSON, names a folder, where the ranks meet, the models' folders by name, and how they are computed. The rank
writes the logprobs of every prompt position, and the greedy tokens after it, to `rank<r>.npz` in the folder; then it answers
with a line: an empty one, or what failed.
"""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.operations import COMPOSED

from quire.distributed.communicator import Communicator
from quire.distributed.gloo import GlooGroup
from quire.distributed.token_exchange import AllToAll
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


def compute(path: Path, communicator: Communicator | None, experts: str = "split") -> tuple[np.ndarray, list[int]]:
    """Logprobs [tokens, V] of the prompt, in chunks beside another request, and the tokens after it. `experts` are `split`,
    `whole`, or whole and tokens are `exchanged`."""
    exchange = AllToAll(communicator) if communicator is not None and experts == "exchanged" else None
    driver = ModelDriver(
        build_tiny(path, communicator=communicator, expert_parallel=experts != "split", exchange=exchange)
    )
    sequence, other = Sequence(list(PROMPT), row=2), Sequence(PROMPT[::-1][:20], row=1)
    pieces = [driver.step([(other, 20), (sequence, CHUNK)])[1]]
    pieces.append(driver.prefill(sequence, CHUNK))
    first = int(pieces[-1][-1].argmax())
    sequence.token_ids.append(first)
    return torch.cat(pieces).numpy(), [first, *driver.generate(sequence, NEW_TOKENS)]


def work(rank: int, size: int, folder: str, models: dict[str, str], kernels: str, experts: str) -> None:
    """Do a job."""
    select_kernels(kernels)
    group = GlooGroup(rank, size, f"file://{folder}/meet")
    results: dict[str, np.ndarray] = {}
    for name, path in models.items():
        logprobs, tokens = compute(Path(path), group, experts)
        results[f"{name}/logprobs"], results[f"{name}/tokens"] = logprobs, np.array(tokens)
    np.savez(Path(folder) / f"rank{rank}.npz", **results)
    group.shutdown()


def main(rank: int, size: int) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    before = registry.choices()
    for job in sys.stdin:
        try:
            work(rank, size, **json.loads(job))
            failed = ""
        except Exception:
            failed = traceback.format_exc()
        answers.write(json.dumps(failed) + "\n")
        registry.use(before)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
