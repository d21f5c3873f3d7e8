"""What the conformance suite finds on a device with memory of its own, when something about the made-up device is broken."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.conformance import contract, device_checks, oracle_platform
from quire.conformance.contract import Outcome, Subject, select_checks
from quire.conformance.suite import Plan, run_check, run_checks

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def subject(npu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    select_checks()
    oracle_platform.install()
    monkeypatch.setattr(device_checks, "_LAG_S", 0.0)
    monkeypatch.setattr(device_checks, "_ATTEMPTS", 2)
    subject = Subject("npu", is_quick=True)
    yield subject
    subject.close()


def waits_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.runtime import NpuEvent

    monkeypatch.setattr(NpuEvent, "wait", lambda self: None)


def events_of_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.runtime import NpuEvent

    record = NpuEvent.record

    def early(self: Any) -> None:
        record(self)
        self._number -= 1

    monkeypatch.setattr(NpuEvent, "record", early)


def a_queue_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.runtime import NpuRuntime

    monkeypatch.setattr(NpuRuntime, "synchronize", lambda self: None)


def memory_that_is_always_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.driver import TOTAL_BYTES
    from quire_fake_npu.runtime import NpuRuntime

    monkeypatch.setattr(NpuRuntime, "memory_info", lambda self: (TOTAL_BYTES, TOTAL_BYTES))


def uploads_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.runtime import NpuEvent, NpuUploads

    monkeypatch.setattr(NpuUploads, "submit", lambda self, target, source: NpuEvent())


def the_hosts_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.platform import NpuPlatform

    monkeypatch.setattr(NpuPlatform, "runner_class", lambda self: "quire.worker.model_runner:ModelRunner")


def a_sleep_that_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.worker.worker import Worker

    monkeypatch.setattr(Worker, "sleep", lambda self, level=1: None)
    monkeypatch.setattr(Worker, "wake_up", lambda self, tags=None: None)


def a_kernel_with_another_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu import kernels

    from quire.kernels import registry

    entry = next(each for each in registry.implementations("rms_norm") if each.platform == "npu")
    monkeypatch.setitem(vars(entry), "function", lambda x, weight, eps, *more: kernels.rms_norm(x, weight, 0.1, *more))


def attention_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.attention import NpuBackend

    forward = NpuBackend.forward

    def blind(self: Any, qkv: Any, kv_cache: Any, metadata: Any, params: Any, out: Any) -> None:
        forward(self, qkv, kv_cache, metadata, dataclasses.replace(params, window=0), out)

    monkeypatch.setattr(NpuBackend, "forward", blind)


def pages_counted_along_another_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_fake_npu.attention import NpuBackend

    monkeypatch.setattr(NpuBackend, "page_dimension", 1)


def tokens_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own fault: a runner that reads a step's results without waiting for them."""
    from quire.worker import device_runner

    fetch = device_runner.PendingStep._fetch

    def early(self: Any) -> Any:
        if self._output is None:
            self._output = fetch(self)
        return self._output

    monkeypatch.setattr(device_runner.PendingStep, "result", early)


FAULTS: dict[str, tuple[Break, str]] = {
    "waits that do not wait": (waits_that_do_not_wait, "device/wait"),
    "events that come too early": (events_of_the_next_work, "device/wait"),
    "a queue that is not waited for": (a_queue_that_is_not_waited_for, "device/crossing"),
    "memory that is always free": (memory_that_is_always_free, "device/memory"),
    "uploads that do not come": (uploads_that_do_not_come, "device/uploads"),
    "the runner of the host's memory": (the_hosts_runner, "capabilities/classes"),
    "a sleep that keeps its pages": (a_sleep_that_keeps_its_pages, "sleep/level-1"),
    "a kernel with another epsilon": (a_kernel_with_another_epsilon, "kernels/rms_norm"),
    "attention without windows": (attention_without_windows, "attention/window"),
    "pages counted along another side": (pages_counted_along_another_side, "pages/one-kind"),
    "tokens that are read too early": (tokens_read_too_early, "engine/llama"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = FAULTS[fault]
    assert subject.device.type == "npu"
    with subject.kernels(), monkeypatch.context() as broken:
        plant(broken)
        found = run_check(contract.checks[name], subject)
    assert found.outcome in (Outcome.FAIL, Outcome.ERROR), found.message
    subject.runtime.synchronize()
    again = run_check(contract.checks[name], subject)
    assert again.outcome is Outcome.PASS, again.message


BROKEN = """
from quire_fake_npu.communicator import NpuGroup
from quire_fake_npu.platform import NpuPlatform

class Group(NpuGroup):
    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        tensor[-1] *= 2

class Broken(NpuPlatform):
    def communicator(self, config):
        return Group(config.parallel.rank, config.parallel.tensor_parallel_size, config.parallel.rendezvous)

def probe():
    return "broken_npu:Broken"
"""


@pytest.mark.exhaustive
def test_ranks_whose_sums_are_wrong_in_one_place_are_found(
    npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_npu.py").write_text(BROKEN)
    about = tmp_path / "broken_npu-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-npu\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[quire.platform_plugins]\nbroken = broken_npu:probe\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = run_checks(Plan("broken"), select_checks(["ranks/communicator"]))
    assert found.outcome is Outcome.FAIL and "a sum is wrong" in found.message


def test_a_tensor_of_the_host_in_a_step_is_refused(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device is for: an engine that forgets to move something fails at once."""
    from quire.kernels import ops

    with subject.kernels(), pytest.raises(RuntimeError, match=r"same device|of the CPU and of the NPU"):
        x = torch.zeros(2, 8, device=subject.device)
        ops.layer_norm(x, torch.ones(8), None, 1e-6, x, None)
