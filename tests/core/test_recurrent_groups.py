"""Layers with a state: which pages a request holds, and where another may join."""

import pytest
from tests.oracles.hash_model import RECURRENT, HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core.block_pool import NULL_BLOCK

PROMPT = list(range(40))
HYBRID = (0, RECURRENT)


def held_pages(harness: SchedulerHarness, name: str) -> list[int]:
    """Pages that a request holds, by group."""
    tables = harness.scheduler._requests[name].block_ids
    return [len(table) - table.count(NULL_BLOCK) for table in tables]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 40, 64])
def test_a_request_may_join_at_every_page_boundary_of_an_earlier_one(depth: int, budget: int) -> None:
    for joined in range(4, 41, 4):
        harness = SchedulerHarness(model=HashModel(windows=HYBRID), max_num_batched_tokens=budget, depth=depth)
        harness.add("a", PROMPT, max_tokens=2)
        harness.run()
        harness.add("b", [*PROMPT[:joined], 99, 98], max_tokens=3)
        harness.run()
        assert harness.expected["b"].num_cached_tokens == joined


def test_a_decoding_request_holds_two_states() -> None:
    harness = SchedulerHarness(model=HashModel(windows=(RECURRENT,)), max_num_batched_tokens=64, depth=2)
    harness.add("a", PROMPT[:10], max_tokens=40)
    for _ in range(30):
        harness.step()
        assert held_pages(harness, "a")[0] <= 3
    harness.collect()
    assert held_pages(harness, "a") == [2]
    harness.run()


@pytest.mark.parametrize("windows", [HYBRID, (RECURRENT,), (6, RECURRENT)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_the_state_at_their_prompts_last_boundary(
    windows: tuple[int, ...], depth: int, caching: bool
) -> None:
    for length in (9, 12, 13):
        harness = SchedulerHarness(model=HashModel(windows=windows), depth=depth, prefix_caching=caching)
        for index in range(3):
            harness.add(f"r{index}", PROMPT[:length], seed=index, group_id="g")
        harness.run()
        prefills = sum(int((step.num_scheduled_tokens > 1).sum()) for step in harness.steps)
        assert prefills == 1 + 2 * ((length - 1) % 4 > 0)
        assert [harness.expected[f"r{index}"].num_cached_tokens for index in (1, 2)] == [(length - 1) // 4 * 4] * 2


def test_where_the_state_is_gone_the_attention_pages_alone_help_nobody() -> None:
    harness = SchedulerHarness(model=HashModel(windows=HYBRID), num_blocks=64)
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    pool = harness.scheduler.kv.pool
    states = [block for block, (_, group) in pool._key_of.items() if group == 1]
    for block in states[3:]:
        pool._forget(block)
    harness.add("b", [*PROMPT, 99], max_tokens=2)
    harness.run()
    assert harness.expected["b"].num_cached_tokens == 12


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_finds_its_state_again(mode: str, depth: int) -> None:
    harness = SchedulerHarness(
        model=HashModel(windows=HYBRID),
        num_blocks=18,
        num_host_blocks=40 if mode == "swap" else 0,
        preemption_mode=mode,  # type: ignore[arg-type]
        max_num_batched_tokens=8,
        max_model_len=32,
        depth=depth,
    )
    for index in range(3):
        harness.add(f"r{index}", PROMPT[index : index + 6], max_tokens=20)
    harness.run()
    assert harness.num_preemptions > 0
