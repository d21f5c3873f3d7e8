"""Several ranks: sums and gathers have the same bits on every rank, and an engine over two ranks gives the same tokens.
Processes: a core that dies is replaced and its requests go on; the server answers.

A platform that refuses `tensor_parallel_size=2` (one device, or no communicator) claims neither; one that refuses
`pipeline_parallel_size=2` claims no stages.
"""

import dataclasses
import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import envs
from quire.benchmarks.own_server import started_server
from quire.conformance import oracle_platform
from quire.conformance.contract import Failed, Subject, check, expect
from quire.conformance.engine_checks import ask, compare, engine, limit_of, oracle
from quire.distributed.communicator import Communicator
from quire.entrypoints.http_client import Target, control
from quire.entrypoints.llm import LLM
from quire.processes import start_child
from quire.sampling_params import SamplingParams

SIZE, NUMBERS, ROUNDS = 2, 5000, 3
_PATIENCE_S = 120.0


RANKS: dict[str, Any] = {"tensor_parallel_size": SIZE}
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "over two ranks", RANKS),
    "qwen3-moe": ("qwen3-moe", "over two ranks", RANKS),
    "exchange": (
        "qwen3-moe",
        "whose tokens go to the ranks of their experts",
        RANKS | {"enable_expert_parallel": True, "all2all_backend": "all_to_all"},
    ),
    "stages": ("llama", "in two stages of a pipeline", {"pipeline_parallel_size": SIZE}),
}
"""Checks of engines, by name: the tiny model, how it runs, and the settings."""


def _values(rank: int, round_: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(NUMBERS, generator=generator).to(dtype)


def work(arguments: list[str]) -> int:
    """One rank, in a process of its own: writes what it got to a file."""
    plan = json.loads(arguments[0])
    subject = Subject(plan["platform"])
    config = subject.config_with(**RANKS)
    parallel = dataclasses.replace(config.parallel, rank=plan["rank"], rendezvous=plan["address"])
    config = dataclasses.replace(config, parallel=parallel)
    runtime = subject.platform.runtime(config)
    group = subject.platform.communicator(config)
    assert group is not None, "communicator() is None for two ranks"
    try:
        found = _talk(group, runtime.device(), getattr(torch, subject.dtype_name))
        if subject.capabilities.token_exchange.value:
            found |= _exchange(group, runtime.device(), getattr(torch, subject.dtype_name))
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
        gathered[group.rank] = mine
        group.all_gather(gathered[group.rank] if round_ % 2 else mine, gathered)
        found[f"sum {round_}"], found[f"gather {round_}"] = total.float().cpu().numpy(), gathered.float().cpu().numpy()
    return found


def _rows(rank: int, round_: int) -> list[int]:
    """How many values a rank sends to each: none, some or all of them."""
    first = (0, 7, NUMBERS)[(rank + round_) % 3]
    return [first, NUMBERS - first]


def _exchange(group: Communicator, device: torch.device, dtype: torch.dtype) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for round_ in range(ROUNDS):
        mine = _values(group.rank, round_, dtype).to(device)[:, None]
        came = [_rows(rank, round_)[group.rank] for rank in range(group.size)]
        out = torch.zeros(sum(came), 1, dtype=dtype, device=device)
        group.all_to_all(mine, _rows(group.rank, round_), out, came)
        found[f"exchange {round_}"] = out.flatten().float().cpu().numpy()
    return found


@check(
    "ranks/communicator",
    "all_reduce gives the sum, with the same bits on every rank; all_gather gives every rank's values; all_to_all brings each "
    "rank its own, where it is claimed",
)
def check_communicator(subject: Subject) -> str:
    """Two processes."""
    subject.claims_settings(**RANKS)
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
    what = "sums, gathers and exchanges" if subject.capabilities.token_exchange.value else "sums and gathers"
    return f"{SIZE} ranks, {ROUNDS} {what} of {NUMBERS} values"


def _start(subject: Subject, rank: int, address: str, file: Path) -> "subprocess.Popen[bytes]":
    plan = {"platform": subject.name, "rank": rank, "address": address, "file": str(file)}
    return start_child(f"{__name__}:work", [json.dumps(plan)], kind="worker", stderr=subprocess.PIPE)


def _check_bits(found: list[dict[str, np.ndarray]], dtype: torch.dtype) -> None:
    for round_ in range(ROUNDS):
        values = [_values(rank, round_, dtype).float() for rank in range(SIZE)]
        expect(
            all(np.array_equal(each[f"sum {round_}"], found[0][f"sum {round_}"]) for each in found),
            "ranks got other bits of one sum",
            "the same on every rank",
            f"round {round_}",
        )
        error = float(np.abs(found[0][f"sum {round_}"] - torch.stack(values).sum(0).numpy()).max())
        expect(
            error <= 8 * torch.finfo(dtype).eps * 8,
            "a sum is wrong",
            "the sum of the ranks' values",
            f"off by {error:.1e}",
        )
        for rank, each in enumerate(found):
            parts = [value.split(_rows(source, round_))[rank] for source, value in enumerate(values)]
            expect(
                np.array_equal(each.get(f"exchange {round_}", torch.cat(parts).numpy()), torch.cat(parts).numpy()),
                "an exchange is wrong",
                "what each rank sent to this one",
                f"rank {rank}, round {round_}",
            )
            expect(
                np.array_equal(each[f"gather {round_}"], torch.stack(values).numpy()),
                "a gather is wrong",
                "every rank's values in the order of ranks",
                f"rank {rank}, round {round_}",
            )


def check_engine(model: str, settings: Mapping[str, Any], subject: Subject) -> str:
    """Two workers."""
    subject.claims_settings(**settings)
    expected = oracle(subject, model)
    with engine(subject, subject.name, model, **settings) as llm:
        return compare(ask(llm), expected, limit_of(subject))


for _name, (_model, _how, _settings) in ENGINES.items():
    check(f"ranks/{_name}", f"a tiny {_model} {_how} gives the same tokens", is_long=True)(
        functools.partial(check_engine, _model, _settings)
    )


PROMPT = "The ship came into the harbour, and"
TOKENS = 12


@check(
    "processes/core-dies",
    "a core that is killed in the middle is started again, and the tokens are the same",
    is_long=True,
)
def check_core(subject: Subject) -> str:
    """A kill at the ninth step."""
    expected = oracle(subject)
    mark = subject.folder / "kill-core"
    mark.touch()
    envs.set_variable("QUIRE_FAULTS", f"before-execute@core:kill:9:{mark}")
    try:
        with engine(subject, subject.name, recovery=True) as llm:
            told = compare(ask(llm), expected, limit_of(subject))
    finally:
        envs.set_variable("QUIRE_FAULTS", "")
    expect(
        not mark.exists(),
        "the core was not killed",
        "a core in a process of its own that comes to its ninth step",
        "no kill",
    )
    return f"killed once; {told}"


@check(
    "processes/server",
    "a server answers a completion and a chat, with the text of references on the CPU",
    is_long=True,
)
def check_server(subject: Subject) -> str:
    """The built-in demo model, greedy."""
    settings = {"dtype": subject.dtype_name, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    with LLM(device=oracle_platform.NAME, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        expected = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with started_server(["--device", subject.name, *words]) as url:
        target = Target.parse(url, {}, setting="url")
        model = control(target, "GET", "/v1/models", None)["data"][0]["id"]
        common: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        answer = control(target, "POST", "/v1/completions", common | {"prompt": PROMPT})
        chat = control(
            target, "POST", "/v1/chat/completions", common | {"messages": [{"role": "user", "content": PROMPT}]}
        )
    got = answer["choices"][0]["text"]
    expect(got == expected or limit_of(subject) >= 0.01, "the server's text differs", expected, got)
    expect(chat["choices"][0]["message"]["content"], "the chat's answer is empty", "a text", chat)
    return f"{got!r}"
