"""The scheduler under everything at once: whatever happens, streams equal the oracle's and pages add up.

A failure prints the shortest story that hypothesis found, and a blob (`@reproduce_failure`) that replays it.
"""

import os
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.oracles.hash_model import RECURRENT, Faults, HashModel
from tests.oracles.scheduler_harness import Guessing, SchedulerHarness
from tests.oracles.slow_preparer import SlowPreparer

from quire.errors import RequestError
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest
from quire.sampling_params import StructuredOutputsParams

WINDOWS = [(0,), (0, 6), (9, 9, 9, 0), (5,), (0, RECURRENT), (6, RECURRENT, RECURRENT, RECURRENT), (RECURRENT,)]
SHARED_PREFIX = list(range(100, 140))


@st.composite
def harnesses(draw: st.DrawFn) -> SchedulerHarness:
    windows = draw(st.sampled_from(WINDOWS))
    swaps = draw(st.booleans())
    max_step_tokens = draw(st.sampled_from([2, 7, 40]))
    preparer = None
    if draw(st.booleans()):
        ends, forgets = draw(st.sampled_from([0.02, 0.3, 1.0])), draw(st.sampled_from([0.0, 0.2]))
        preparer = SlowPreparer(draw(st.integers(0, 99)), ends, forgets)
    guessing = None
    if draw(st.booleans()):
        guessing = Guessing(
            num_tokens=draw(st.sampled_from([1, 3, 9])),
            max_drafts=draw(st.sampled_from([2, 30])),
            accuracy=draw(st.sampled_from([0.3, 0.8, 1.0])),
            silence=draw(st.sampled_from([0.0, 0.5])),
            is_adaptive=draw(st.booleans()),
            random=Random(draw(st.integers(0, 99))),
        )
    return SchedulerHarness(
        guessing=guessing,
        model=HashModel(
            windows=windows,
            vocab_size=50,
            eos_every=draw(st.sampled_from([0, 4, 12])),
            forced_every=draw(st.sampled_from([0, 1, 3])),
        ),
        block_size=draw(st.sampled_from([1, 4, 5])),
        num_blocks=draw(st.sampled_from([20, 45, 300])),
        num_host_blocks=draw(st.sampled_from([3, 60])) if swaps else 0,
        preemption_mode="swap" if swaps else "recompute",
        policy=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        prefix_caching=draw(st.booleans()),
        depth=draw(st.sampled_from([1, 2])),
        faults=Faults(
            seed=draw(st.integers(0, 99)),
            row_error_rate=draw(st.sampled_from([0.0, 0.0, 0.03])),
            lost_step_rate=draw(st.sampled_from([0.0, 0.0, 0.1])),
        ),
        max_num_seqs=draw(st.sampled_from([1, 3, 6])),
        max_num_batched_tokens=max_step_tokens,
        enable_chunked_prefill=max_step_tokens < 40 or draw(st.booleans()),
        max_model_len=40,
        min_common_tokens=draw(st.sampled_from([1, 10, 64])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 5])),
        max_num_partial_prefills=draw(st.sampled_from([0, 0, 1])),
        max_step_ms=draw(st.sampled_from([0.0, 0.0, 1.2])),
        max_step_factor=draw(st.sampled_from([0.0, 1.5])),
        preparer=preparer,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, resets, in any order."""

    harness: SchedulerHarness
    count = 0

    @initialize(harness=harnesses())
    def start(self, harness: SchedulerHarness) -> None:
        self.harness = harness

    def _prompt(self, data: st.DataObject) -> list[int]:
        shared = SHARED_PREFIX[: data.draw(st.integers(0, 30), label="shared")]
        return shared + data.draw(st.lists(st.integers(0, 3), min_size=0 if shared else 1, max_size=8), label="own")

    @rule(data=st.data(), siblings=st.sampled_from([1, 1, 2, 3]))
    def add(self, data: st.DataObject, siblings: int) -> None:
        prompt = self._prompt(data)
        group_id = f"group{self.count}" if siblings > 1 else None
        eos = self.harness.model.eos_token_id
        form = data.draw(st.sampled_from([None, "a", "b", f"new {self.count}"]), label="form")
        for _ in range(siblings):
            self.count += 1
            fields = {
                "seed": self.count,
                "group_id": group_id,
                "priority": data.draw(st.integers(0, 2)),
                "is_background": data.draw(st.sampled_from([False, False, True])),
                "tenant": data.draw(st.sampled_from("ab")),
                "tenant_weight": data.draw(st.sampled_from([0.5, 3.0])),
                "cache_salt": data.draw(st.sampled_from([None, None, "x"])),
                "max_tokens": data.draw(st.sampled_from([1, 2, 9, 30, None])),
                "eos_token_ids": [eos],
                "ignore_eos": data.draw(st.booleans()),
                "structured_outputs": None if form is None else StructuredOutputsParams(regex=form),
                "stop_token_ids": data.draw(st.sampled_from([None, [3, 7, 11], list(range(10))])),
                "min_tokens": data.draw(st.sampled_from([0, 0, 3])) if siblings == 1 else 0,
                "skip_reading_prefix_cache": data.draw(st.sampled_from([None, True])),
                "prompt_logprobs": data.draw(st.sampled_from([None, None, 1])),
                "logprobs": data.draw(st.sampled_from([None, None, 2])),
            }
            if fields["max_tokens"] is not None:
                fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
            try:
                self.harness.add(f"r{self.count}", prompt, **fields)
            except RequestError as error:
                assert "KV-cache pages" in str(error), error
        self.harness.check()

    @rule(data=st.data(), skips=st.booleans())
    def add_pooled(self, data: st.DataObject, skips: bool) -> None:
        self.count += 1
        params = PoolingParams(skip_reading_prefix_cache=skips)
        try:
            self.harness.add_request(EngineRequest(f"r{self.count}", self._prompt(data), pooling_params=params))
        except RequestError as error:
            assert "KV-cache pages" in str(error), error

    @rule(data=st.data())
    def resume_after_restart(self, data: st.DataObject) -> None:
        """A request comes back with the tokens that it had emitted before a crash."""
        self.count += 1
        prompt, params = self._prompt(data), {"max_tokens": 12, "eos_token_ids": [self.harness.model.eos_token_id]}
        try:
            expected = self.harness.add(f"r{self.count}", prompt, seed=self.count, **params)
        except RequestError:
            return
        self.harness.abort([f"r{self.count}"])
        emitted = expected.stream[: data.draw(st.integers(0, len(expected.stream) - 1), label="emitted")]
        self.count += 1
        self.harness.add(f"r{self.count}", prompt, seed=self.count - 1, resumed_token_ids=emitted, **params)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.count)
    @rule(data=st.data(), plans_first=st.booleans())
    def abort(self, data: st.DataObject, plans_first: bool) -> None:
        """Also between planning and collecting, where the request's step is in flight."""
        if plans_first and len(self.harness.in_flight) < 2:
            self.harness.plan()
        names = [name for name, expected in self.harness.expected.items() if expected.finish is None]
        if names:
            self.harness.abort(data.draw(st.lists(st.sampled_from(names), max_size=4), label="aborted"))

    @rule()
    def collect_all(self) -> None:
        while self.harness.in_flight:
            self.harness.collect()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.reset_prefix_cache()
        assert self.harness.scheduler.kv.pool.num_cached == 0
        self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()


def run_machine(examples: int, steps: int, **options: Any) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_every_stream_equals_the_oracle_and_every_page_is_accounted_for() -> None:
    run_machine(examples=120, steps=25)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_long_stories_hold_as_well() -> None:
    run_machine(examples=int(os.environ.get("QUIRE_TEST_EXAMPLES", "3000")), steps=60)
