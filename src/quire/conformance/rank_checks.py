"""Several ranks: sums and gathers have the same bits on every rank, and an engine over two ranks gives the same tokens.

A platform that refuses `tensor_parallel_size=2` (one device, or no communicator) claims neither; one that refuses
`pipeline_parallel_size=2` claims no stages.
"""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import numpy as np
import torch

from quire.conformance.contract import Failed, NotClaimed, Subject, check
from quire.conformance.engine_checks import ask, compare, engine, limit_of, oracle
from quire.distributed.communicator import Communicator
from quire.errors import ConfigError
from quire.processes import start_child

SIZE, NUMBERS, ROUNDS = 2, 5000, 3
_PATIENCE_S = 120.0


def _claims_ranks(subject: Subject, setting: str = "tensor_parallel_size") -> None:
    try:
        subject.config_with(**{setting: SIZE})
    except ConfigError as error:
        raise NotClaimed(str(error)) from error


def _values(rank: int, round_: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(NUMBERS, generator=generator).to(dtype)


def work(arguments: list[str]) -> int:
    """One rank, in a process of its own: writes what it got to a file."""
    plan = json.loads(arguments[0])
    subject = Subject(plan["platform"])
    config = subject.config_with(tensor_parallel_size=SIZE)
    parallel = dataclasses.replace(config.parallel, rank=plan["rank"], rendezvous=plan["address"])
    config = dataclasses.replace(config, parallel=parallel)
    runtime = subject.platform.runtime(config)
    group = subject.platform.communicator(config)
    assert group is not None, "communicator() is None for two ranks"
    try:
        found = _talk(group, runtime.device(), getattr(torch, subject.dtype_name))
    finally:
        group.shutdown()
        runtime.close()
    np.savez(plan["file"], **found)  # pyright: ignore[reportArgumentType]  # numpy types its options only
    return 0


def _talk(group: Communicator, device: torch.device, dtype: torch.dtype) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for round_ in range(ROUNDS):
        mine = _values(group.rank, round_, dtype).to(device)
        total, gathered = mine.clone(), torch.zeros(group.size, NUMBERS, dtype=dtype, device=device)
        group.all_reduce(total)
        group.all_gather(mine, gathered)
        found[f"sum {round_}"], found[f"gather {round_}"] = total.float().cpu().numpy(), gathered.float().cpu().numpy()
    return found


@check(
    "ranks/communicator",
    "all_reduce gives the sum, with the same bits on every rank; all_gather gives every rank's values",
)
def check_communicator(subject: Subject) -> str:
    """Two processes."""
    _claims_ranks(subject)
    files = [subject.folder / f"rank{rank}.npz" for rank in range(SIZE)]
    address = f"file://{subject.folder}/meet"
    processes = [_start(subject, rank, address, file) for rank, file in enumerate(files)]
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=_PATIENCE_S)
            if process.returncode:
                last = errors.decode(errors="replace").strip().splitlines()[-1:]
                raise Failed(f"rank {rank} ended with code {process.returncode}", "code 0", *last)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    _check_bits([np.load(file) for file in files], getattr(torch, subject.dtype_name))
    return f"{SIZE} ranks, {ROUNDS} sums and gathers of {NUMBERS} values"


def _start(subject: Subject, rank: int, address: str, file: Path) -> "subprocess.Popen[bytes]":
    plan = {"platform": subject.name, "rank": rank, "address": address, "file": str(file)}
    return start_child(f"{__name__}:work", [json.dumps(plan)], kind="worker", stderr=subprocess.PIPE)


def _check_bits(found: list[dict[str, np.ndarray]], dtype: torch.dtype) -> None:
    for round_ in range(ROUNDS):
        values = [_values(rank, round_, dtype).float() for rank in range(SIZE)]
        if any(not np.array_equal(each[f"sum {round_}"], found[0][f"sum {round_}"]) for each in found):
            raise Failed("ranks got other bits of one sum", "the same on every rank", f"round {round_}")
        error = float(np.abs(found[0][f"sum {round_}"] - torch.stack(values).sum(0).numpy()).max())
        if not error <= 8 * torch.finfo(dtype).eps * 8:
            raise Failed("a sum is wrong", "the sum of the ranks' values", f"off by {error:.1e}")
        for rank, each in enumerate(found):
            if not np.array_equal(each[f"gather {round_}"], torch.stack(values).numpy()):
                raise Failed(
                    "a gather is wrong", "every rank's values in the order of ranks", f"rank {rank}, round {round_}"
                )


def check_engine(model: str, setting: str, subject: Subject) -> str:
    """Two workers."""
    _claims_ranks(subject, setting)
    expected = oracle(subject, model)
    with engine(subject, subject.name, model, **{setting: SIZE}) as llm:
        return compare(ask(llm), expected, limit_of(subject))


for _model in ("llama", "qwen3-moe"):
    check(f"ranks/{_model}", f"a tiny {_model} over two ranks gives the same tokens", is_long=True)(
        functools.partial(check_engine, _model, "tensor_parallel_size")
    )
check("ranks/stages", "a tiny llama in two stages of a pipeline gives the same tokens", is_long=True)(
    functools.partial(check_engine, "llama", "pipeline_parallel_size")
)
