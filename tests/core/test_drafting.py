"""Speculation in the scheduler: whatever is guessed, streams equal the oracle's, in fewer steps where guesses are right."""

import pytest
from tests.oracles.hash_model import RECURRENT, Faults, HashModel
from tests.oracles.scheduler_harness import Guessing, SchedulerHarness

from quire.core.drafting import MOST_AGAIN
from quire.sampling_params import SamplingParams

PROMPTS = [list(range(10 * number, 10 * number + 3 + 4 * number)) for number in range(1, 5)]


def run(guessing: Guessing | None, *, max_tokens: int = 20, **settings: object) -> SchedulerHarness:
    harness = SchedulerHarness(guessing=guessing, max_model_len=100, **settings)  # type: ignore[arg-type]
    for number, prompt in enumerate(PROMPTS):
        harness.add(f"r{number}", prompt, seed=number, max_tokens=max_tokens)
    harness.run()
    return harness


@pytest.mark.parametrize("depth", [1, 2])
def test_right_guesses_make_steps_fewer(depth: int) -> None:
    without, right = run(None, depth=depth), run(Guessing(accuracy=1.0, silence=0.0), depth=depth)
    assert len([step for step in right.steps if step.total_num_tokens]) * 2 < len(without.steps)
    counts = right.scheduler._stats.drafts
    assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens


def test_wrong_guesses_cost_no_step() -> None:
    without, wrong = run(None), run(Guessing(accuracy=0.0, silence=0.0))
    assert len(without.steps) == len(wrong.steps)
    assert wrong.scheduler._stats.drafts.num_accepted_tokens == 0 < wrong.scheduler._stats.drafts.num_draft_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,), (RECURRENT,), (0, RECURRENT)])
@pytest.mark.parametrize("accuracy", [0.5, 0.9])
def test_streams_equal_the_oracles_over_all_kinds_of_pages(
    depth: int, block_size: int, windows: tuple[int, ...], accuracy: float
) -> None:
    model = HashModel(windows=windows, eos_every=25)
    for num_blocks in (30 + 60 // block_size, 300):
        run(Guessing(accuracy=accuracy), depth=depth, block_size=block_size, model=model, num_blocks=num_blocks)


@pytest.mark.parametrize("windows", [(0,), (0, RECURRENT)])
@pytest.mark.parametrize("depth", [1, 2])
def test_lost_steps_and_failing_rows_do_no_harm_to_others(depth: int, windows: tuple[int, ...]) -> None:
    for seed in range(12):
        faults = Faults(seed, row_error_rate=0.02, lost_step_rate=0.1)
        model = HashModel(windows=windows)
        run(Guessing(), depth=depth, faults=faults, num_blocks=60, model=model)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_row_finds_the_state_before_its_wrong_draft(mode: str, depth: int) -> None:
    settings = {"num_blocks": 26, "num_host_blocks": 60 if mode == "swap" else 0, "preemption_mode": mode}
    for accuracy in (0.0, 0.5, 0.9):
        model = HashModel(windows=(0, RECURRENT))
        harness = run(Guessing(accuracy=accuracy), depth=depth, model=model, max_num_batched_tokens=8, **settings)
        assert harness.num_preemptions > 0


def test_right_drafts_of_a_row_with_states_are_computed_once_and_wrong_ones_are_bounded() -> None:
    model = HashModel(windows=(RECURRENT,))
    right = run(Guessing(accuracy=1.0, silence=0.0), model=model)
    assert sum(step.total_num_tokens for step in right.steps) < 1.3 * sum(map(len, PROMPTS)) + 80
    wrong = run(Guessing(accuracy=0.0, silence=0.0), model=model)
    assert max(int(step.num_scheduled_tokens.max(initial=0)) for step in wrong.steps[4:]) <= MOST_AGAIN + 4
    assert len(wrong.steps) == len(run(None, model=model).steps)


def test_tokens_behind_a_stop_are_not_given() -> None:
    guessing = Guessing(accuracy=1.0, silence=0.0, num_tokens=9)
    stream = HashModel().oracle([1, 2, 3], SamplingParams(max_tokens=40), 1, 40)
    for stop in range(1, 30):
        guessing.stream = stream
        harness = SchedulerHarness(guessing=guessing, max_model_len=100)
        harness.add("stops", [1, 2, 3], seed=1, max_tokens=40, stop_token_ids=[stream[stop]], logprobs=1)
        harness.run()
        expected = harness.expected["stops"]
        assert expected.got == stream[: stream.index(stream[stop]) + 1]
        logprobs = [output.logprobs for output in expected.outputs if output.logprobs is not None]
        assert sum(len(told.token_ids) for told in logprobs) == len(expected.got)
