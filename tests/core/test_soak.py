"""Many requests through one scheduler: nothing may pile up, and nothing may depend on who waits."""

import gc
import random
import resource
from pathlib import Path

import pytest
from tests.oracles.hash_model import HashModel
from tests.oracles.scheduler_harness import SchedulerHarness


def resident_bytes() -> int:
    """This process's resident memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


class Soak:
    """Random requests, a tenth of them aborted, at most `at_once` alive; finished ones are forgotten by the test too."""

    def __init__(self, seed: int, at_once: int = 96) -> None:
        self.random = random.Random(seed)
        self.model = HashModel(windows=(0, 8), vocab_size=100, eos_every=20)
        self.harness = SchedulerHarness(
            model=self.model,
            block_size=4,
            num_blocks=200,
            num_host_blocks=60,
            preemption_mode="swap",
            policy="fair",
            depth=2,
            max_num_seqs=48,
            max_num_batched_tokens=256,
            max_model_len=48,
        )
        self.harness.check = lambda: None  # type: ignore[method-assign]
        self.at_once = at_once
        self.added = 0

    def _add(self) -> None:
        draw = self.random
        name = f"r{self.added}"
        self.added += 1
        shared = [draw.randrange(6)] * draw.randrange(16)
        prompt = shared + [draw.randrange(99) for _ in range(draw.randrange(1, 8))]
        self.harness.add(
            name,
            prompt,
            seed=self.added,
            tenant=draw.choice("abc"),
            eos_token_ids=[self.model.eos_token_id],
            max_tokens=draw.randrange(1, 10),
            group_id=f"g{self.added // 3}",
            cache_salt=draw.choice([None, "x"]),
        )
        if draw.random() < 0.1:
            alive = [each for each, expected in self.harness.expected.items() if expected.finish is None]
            self.harness.abort([name, draw.choice(alive)])

    def serve(self, count: int) -> None:
        """Add `count` requests as there is room, and run until all have ended."""
        harness, target = self.harness, self.added + count
        while self.added < target or harness.scheduler.has_work():
            while self.added < target and len(harness.scheduler._requests) < self.at_once:
                self._add()
            harness.step()
            if len(harness.expected) > 4 * self.at_once:
                self._forget()
        self._forget()
        harness.check_idle()

    def _forget(self) -> None:
        self.harness.expected = {
            name: expected for name, expected in self.harness.expected.items() if expected.finish is None
        }
        self.harness.steps.clear()


def test_two_thousand_requests_leave_nothing_behind() -> None:
    soak = Soak(seed=1)
    soak.serve(2000)
    scheduler = soak.harness.scheduler
    assert not scheduler.waiting.prefixes._groups and not scheduler._requests
    assert len(scheduler.waiting._queue) == 0 and not scheduler.waiting._queue._queue._tenants  # type: ignore[attr-defined]
    assert soak.harness.num_preemptions > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_memory_is_flat_over_two_hundred_thousand_requests() -> None:
    soak = Soak(seed=2)
    soak.serve(20_000)
    gc.collect()
    before = resident_bytes()
    for _ in range(9):
        soak.serve(20_000)
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 16 << 20, f"resident memory grew by {grown / 2**20:.1f} MiB"
