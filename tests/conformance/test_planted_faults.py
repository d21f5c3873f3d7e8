"""The conformance suite finds what is wrong on a platform that was broken on purpose, and passes it once it is whole again."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.cpu import CpuBackend
from quire.config import EngineConfig
from quire.conformance import contract, device_checks, oracle_platform, rank_checks
from quire.conformance.contract import Failed, Outcome, Subject, select_checks
from quire.conformance.suite import Result, run_check
from quire.errors import ConfigError, Explained
from quire.kernels import registry
from quire.platforms.cpu import CpuPlatform, CpuRuntime
from quire.worker.page_store import PageStore

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def subject(kept_selection: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    select_checks()
    oracle_platform.install()
    monkeypatch.setattr(device_checks, "_LAG_S", 0.0)
    monkeypatch.setattr(device_checks, "_ATTEMPTS", 2)
    CpuPlatform().select_kernels()  # registers what faults are planted in
    subject = Subject("cpu", is_quick=True)
    yield subject
    subject.close()


def run(name: str, subject: Subject) -> Result:
    return run_check(contract.checks[name], subject)


def replace_kernel(op: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Break:
    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        for entry in registry.implementations(op):
            if entry.platform == "cpu":
                monkeypatch.setitem(vars(entry), "function", change(entry.function))

    return apply


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """As if the kernel summed in bfloat16."""

    def call(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor, *more: Any) -> None:
        function(x_TD, weight_D, eps, out_TD, *more)
        out_TD.copy_(out_TD.bfloat16())

    return call


def blind_for_the_last_key(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(qkv: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, *others: Any) -> None:
        shorter = dataclasses.replace(metadata, seq_lens=(metadata.seq_lens - 1).clamp(min=1))
        function(qkv, kv_cache, shorter, *others)

    return call


def pages_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = CpuBackend.allocate

    def overlapping(self: CpuBackend, spec: Any, num_blocks: int, device: torch.device) -> torch.Tensor:
        pages = allocate(self, spec, num_blocks, device)
        strides = [pages.stride(0), pages.stride(1) - spec.head_dim, *pages.stride()[2:]]
        return pages.as_strided(pages.shape, strides)

    monkeypatch.setattr(CpuBackend, "allocate", overlapping)


def pages_that_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = CpuBackend.allocate
    monkeypatch.setattr(CpuBackend, "allocate", lambda *given: allocate(*given).add_(1))


def swap_that_forgets_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = PageStore.swap_in
    monkeypatch.setattr(PageStore, "swap_in", lambda self, pairs: swap_in(self, pairs[1:]))


def uploads_that_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "upload", lambda self, array: torch.from_numpy(array))


def pinned_copies_that_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "pinned", lambda self, tensor: torch.zeros_like(tensor))


def a_peak_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "peak_memory", lambda self: 1 << 20)


def free_memory_above_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "memory_info", lambda self: (9 << 30, 8 << 30))


def another_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "memory_bytes", lambda self: 1 << 30)


def replays_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.cpu.recording import CpuRecordedStep

    replay = CpuRecordedStep.replay
    monkeypatch.setattr(CpuRecordedStep, "replay", lambda self, tokens, logits: replay(self, 8, 1))


def claims(**values: Any) -> Break:
    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        capabilities = CpuPlatform.capabilities
        changed = {name: Explained(value, "a lie") for name, value in values.items()}
        monkeypatch.setattr(
            CpuPlatform, "capabilities", lambda self: dataclasses.replace(capabilities(self), **changed)
        )

    return apply


def refuses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_config(self: CpuPlatform, config: EngineConfig) -> EngineConfig:
        if config.model.dtype == "float16":
            raise ConfigError("no float16 here")
        return config

    monkeypatch.setattr(CpuPlatform, "check_config", check_config)


def a_runtime_that_closes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: CpuRuntime) -> None:
        if "is_closed" in vars(self):
            raise RuntimeError("closed twice")
        vars(self)["is_closed"] = True

    monkeypatch.setattr(CpuRuntime, "close", close)


FAULTS: dict[str, tuple[Break, str, str]] = {
    "a kernel that rounds": (replace_kernel("rms_norm", rounded), "kernels/rms_norm", "kernels differ"),
    "an operation that writes nothing": (
        replace_kernel("add", lambda _: lambda *_: None),
        "kernels/add",
        "kernels differ",
    ),
    "an argmax that is off by one": (
        replace_kernel("argmax", lambda argmax: lambda x, out: (argmax(x, out), out.add_(1))),
        "sampler/greedy",
        "other tokens are drawn",
    ),
    "attention without the newest key": (
        replace_kernel("paged_attention", blind_for_the_last_key),
        "attention/plain",
        "differs in step 0",
    ),
    "pages that overlap": (pages_that_overlap, "pages/one-kind", "overlap"),
    "pages that are not zero": (pages_that_are_not_zero, "pages/one-kind", "are not zero"),
    "a swap that forgets a page": (swap_that_forgets_a_page, "pages/states", "change on their way"),
    "uploads that are no copies": (uploads_that_share_the_hosts_memory, "device/crossing", "an upload"),
    "pinned copies that are empty": (pinned_copies_that_are_empty, "device/pinned", "a pinned copy"),
    "pinned memory that is not there": (claims(pinning=True), "device/pinned", "is not pinned"),
    "a peak that stands still": (a_peak_that_stands_still, "device/peak", "below an allocation"),
    "more free memory than there is": (free_memory_above_all_memory, "device/memory", "makes no sense"),
    "two totals": (another_total, "device/total", "two figures of one memory"),
    "a replay that ignores its size": (replays_of_all_rows, "device/record", "for 3 rows"),
    "a type that is claimed and refused": (refuses_float16, "capabilities/config", "no float16 here"),
    "a type without a name": (claims(dtypes=("float31",)), "capabilities/record", "not whole"),
    "a runtime that closes once": (a_runtime_that_closes_once, "device/closes", "closed twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, message = FAULTS[fault]
    with monkeypatch.context() as broken:
        plant(broken)
        found = run(name, subject)
    assert found.outcome in (Outcome.FAIL, Outcome.ERROR) and message in found.message
    subject.__dict__.pop("capabilities", None)
    assert run(name, subject).outcome is Outcome.PASS


def test_figures_that_follow_an_allocation_pass_and_those_that_do_not_give_it_back_fail(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [5 << 30, (5 << 30) - device_checks.ALLOCATION]

    def figures(*, gives_back: bool) -> Iterator[tuple[int, int]]:
        yield free[0], 6 << 30
        while True:
            yield from ((free[0], 6 << 30), (free[1], 6 << 30), (free[0] if gives_back else free[1], 6 << 30))

    monkeypatch.setattr(subject.runtime, "kv_cache_cap", lambda: None)
    for gives_back, outcome in ((True, Outcome.PASS), (False, Outcome.FAIL)):
        told = figures(gives_back=gives_back)
        monkeypatch.setattr(subject.runtime, "memory_info", lambda told=told: next(told))
        assert run("device/memory", subject).outcome is outcome


WRONG: dict[str, tuple[Callable[[list[dict[str, np.ndarray]]], None], str]] = {
    "a sum that leaves a rank out": (lambda found: _put(found, "sum 1", found[1]["gather 1"][0]), "a sum is wrong"),
    "ranks with other bits of a sum": (
        lambda found: found[1].update({"sum 2": np.nextafter(found[1]["sum 2"], np.float32(np.inf))}),
        "other bits",
    ),
    "a gather in another order": (
        lambda found: found[0].update({"gather 0": found[0]["gather 0"][::-1]}),
        "a gather is wrong",
    ),
    "a gather of the first round again": (
        lambda found: found[1].update({"gather 2": found[1]["gather 0"]}),
        "a gather is wrong",
    ),
    "an exchange in the order of receivers": (
        lambda found: found[0].update({"exchange 0": found[1]["exchange 0"]}),
        "an exchange is wrong",
    ),
    "an exchange that loses a row": (
        lambda found: found[1].update({"exchange 1": found[1]["exchange 1"][1:]}),
        "an exchange is wrong",
    ),
}


def _put(found: list[dict[str, np.ndarray]], name: str, values: np.ndarray) -> None:
    for each in found:
        each[name] = values


def honest_ranks() -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = [{} for _ in range(rank_checks.SIZE)]
    for round_ in range(rank_checks.ROUNDS):
        values = torch.stack([rank_checks._values(rank, round_, torch.float32) for rank in range(rank_checks.SIZE)])
        _put(found, f"sum {round_}", values.sum(0).numpy())
        _put(found, f"gather {round_}", values.numpy())
        for rank, each in enumerate(found):
            sent = [row.split(rank_checks._rows(source, round_))[rank] for source, row in enumerate(values)]
            each[f"exchange {round_}"] = torch.cat(sent).numpy()
    return found


@pytest.mark.parametrize("fault", WRONG)
def test_a_communicator_that_sums_gathers_or_exchanges_wrongly_is_found(fault: str) -> None:
    spoil, message = WRONG[fault]
    found = honest_ranks()
    rank_checks._check_bits(found, torch.float32)
    spoil(found)
    with pytest.raises(Failed, match=message):
        rank_checks._check_bits(found, torch.float32)
