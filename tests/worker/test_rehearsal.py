"""Before its first step a device's runner goes through every size of step, so that their kernels can be made ready."""

from pathlib import Path

import pytest
from tests.oracles.async_platform import AsyncCpuRuntime
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run

from quire.worker.device_runner import DeviceRunner


@pytest.mark.parametrize("eager", [False, True])
def test_a_rehearsal_has_every_size_and_changes_no_token(
    llama: Path, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    sizes, calls = [], []
    compute = DeviceRunner._compute

    def noted(self, shape):
        sizes.append((shape.num_tokens, shape.max_query_len))
        compute(self, shape)

    def rehearse(self, launch_all):
        calls.append(self)
        launch_all()
        assert self.counts["captured"] == 0

    monkeypatch.setattr(DeviceRunner, "_compute", noted)
    monkeypatch.setattr(AsyncCpuRuntime, "rehearse", rehearse)
    monkeypatch.setattr(AsyncCpuRuntime, "started", lambda self: calls.append("started"))
    monkeypatch.setattr(AsyncCpuRuntime, "close", lambda self: calls.append("closed"))
    engine = make_engine(monkeypatch, llama, enforce_eager=eager)
    runtime = engine.platform.last_runtime
    assert calls == [runtime, "started"]
    assert {(1, 1), (16, 16)} <= set(sizes) and max(sizes)[0] > 16
    prompts = make_prompts()
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)
    engine.executor.shutdown()
    assert calls[2:] == ["closed"]
