import numpy as np
import pytest
from tests.oracles.hash_model import RECURRENT, Faults, HashExecutor, HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config.kv_spec import KVCacheConfig, group_layers
from quire.core.output import NewRequestData, SchedulerOutput
from quire.errors import EngineError
from quire.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10]
PARAMS = SamplingParams(max_tokens=None)


def executor(model: HashModel | None = None, **options: object) -> HashExecutor:
    made = HashExecutor(model=model or HashModel(), block_size=4, **options)  # type: ignore[arg-type]
    made.initialize(KVCacheConfig(20, group_layers(made.kv_cache_specs()), num_host_blocks=4))
    return made


def step(step_id: int, rows: dict[int, int], samples: bool = True, **diff: object) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=np.array(list(rows), dtype=np.int32),
        num_scheduled_tokens=np.array(list(rows.values()), dtype=np.int32),
        needs_sample=np.full(len(rows), samples),
        total_num_tokens=sum(rows.values()),
        **diff,  # type: ignore[arg-type]
    )


def new(row: int, pages: list[list[int]], computed: int = 0, tokens: list[int] | None = None) -> NewRequestData:
    return NewRequestData(f"r{row}", row, list(tokens or PROMPT), len(PROMPT), computed, pages, PARAMS, seed=3)


def tokens_of(runner: HashExecutor, *steps: SchedulerOutput) -> list[int]:
    tokens: list[int] = []
    for each in steps:
        runner.execute(each)
        tokens += runner.collect().token_ids.tolist()
    return tokens


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3), (7, 7, 0), (RECURRENT,), (0, RECURRENT)])
def test_pages_give_the_stream_that_the_oracle_gives_without_them(windows: tuple[int, ...]) -> None:
    runner = executor(HashModel(windows=windows))
    groups = len(runner._windows)
    tables = [[3 + 4 * group, 1 + 4 * group, 4 + 4 * group] for group in range(groups)]
    got = tokens_of(
        runner,
        step(0, {0: 4}, samples=False, new_requests=[new(0, tables)]),
        step(1, {0: 2}),
        *(step(index, {0: 1}) for index in range(2, 6)),
    )
    assert got == runner.model.oracle(PROMPT, PARAMS, 3, 5)


@pytest.mark.parametrize(
    "damage", ["swapped pages", "another's page", "wrong offset", "stale token", "first value only"]
)
def test_any_damage_to_a_page_changes_the_stream(damage: str) -> None:
    runner = executor()
    first = tokens_of(runner, step(0, {0: 6}, new_requests=[new(0, [[1, 2, 3]])]))
    if damage == "swapped pages":
        runner._rows[0].tables[0][:2] = [2, 1]
    elif damage == "another's page":
        runner._rows[0].tables[0][0] = 9
    elif damage == "wrong offset":
        runner._first[1], runner._second[1] = np.roll(runner._first[1], 1), np.roll(runner._second[1], 1)
    elif damage == "stale token":
        runner._second[1, 2] += np.uint64(1)
    else:
        runner._first[1, 2] += np.uint64(1)
    later = tokens_of(runner, step(1, {0: 1}), step(2, {0: 1}))
    assert first == runner.model.oracle(PROMPT, PARAMS, 3, 1)
    assert first + later != runner.model.oracle(PROMPT, PARAMS, 3, 3)


@pytest.mark.parametrize("damage", ["another's page", "an older state", "one slot written"])
def test_any_damage_to_a_state_changes_the_stream(damage: str) -> None:
    runner = executor(HashModel(windows=(RECURRENT,)))
    first = tokens_of(runner, step(0, {0: 6}, new_requests=[new(0, [[1, 2, 3]])]))
    if damage == "another's page":
        runner._rows[0].tables[0][1] = 9
    elif damage == "an older state":
        runner._rows[0].tables[0][1] = 1
    else:
        runner._second[2, 3] += np.uint64(1)
    later = tokens_of(runner, step(1, {0: 1}), step(2, {0: 1}))
    assert first == runner.model.oracle(PROMPT, PARAMS, 3, 1)
    assert first + later != runner.model.oracle(PROMPT, PARAMS, 3, 3)


def test_a_request_joins_at_a_page_that_holds_a_state() -> None:
    runner = executor(HashModel(windows=(RECURRENT,)))
    first = tokens_of(runner, step(0, {0: 6}, new_requests=[new(0, [[1, 2, 3]])]))
    joined = new(1, [[1, 4]], computed=4)
    assert tokens_of(runner, step(1, {1: 2}, new_requests=[joined])) == first
    assert tokens_of(runner, step(2, {2: 2}, new_requests=[new(2, [[3, 5]], computed=4)])) != first


def test_the_same_tokens_under_another_prefix_are_another_content() -> None:
    runner = executor()
    other = [99, *PROMPT[1:]]
    tokens_of(runner, step(0, {0: 6}, new_requests=[new(0, [[1, 2, 3]], tokens=other)]))
    stolen = tokens_of(runner, step(1, {1: 4}, samples=False, new_requests=[new(1, [[4, 5, 6]])]), step(2, {1: 2}))
    assert stolen == runner.model.oracle(PROMPT, PARAMS, 3, 1)
    wrong = step(3, {2: 1}, new_requests=[new(2, [[4, 2, 7]], computed=5)])
    assert tokens_of(runner, wrong) != runner.model.oracle(PROMPT, PARAMS, 3, 1)


def test_swaps_move_content() -> None:
    runner = executor()
    first = tokens_of(runner, step(0, {0: 6}, new_requests=[new(0, [[1, 2]])]))
    moved = step(
        1,
        {1: 1},
        finished_rows=[0],
        swap_outs=[(1, 0), (2, 3)],
        swap_ins=[(0, 8), (3, 7)],
        new_requests=[new(1, [[8, 7]], computed=6, tokens=PROMPT + first)],
    )
    assert first + tokens_of(runner, moved) == runner.model.oracle(PROMPT, PARAMS, 3, 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (step(0, {4: 1}), "row 4, which nobody owns"),
        (step(0, {}, finished_rows=[2]), "finishes row 2"),
        (step(0, {0: 6}, new_requests=[new(0, [[1]])]), "6 tokens in 1 pages"),
        (step(0, {0: 6}, new_requests=[new(0, [[0, 1]])]), "writes page 0"),
        (step(0, {0: 6, 1: 6}, new_requests=[new(0, [[1, 2]]), new(1, [[3, 2]])]), "writes page 2"),
        (step(0, {0: 7}, new_requests=[new(0, [[1, 2]])]), "told to compute 7"),
        (step(0, {0: 4}, new_requests=[new(0, [[1, 2]])]), "4 computed"),
        (step(0, {0: 6}, new_requests=[new(0, [[1, 2]]), new(0, [[3, 4]])]), "is taken"),
        (step(0, {0: 6}, new_requests=[new(0, [])]), "tables for 0 KV groups"),
    ],
)
def test_what_breaks_the_contract_is_an_error(bad: SchedulerOutput, message: str) -> None:
    runner = executor()
    runner.execute(bad)
    with pytest.raises(EngineError, match=message):
        runner.collect()


def test_at_most_two_steps_are_in_flight() -> None:
    runner = executor()
    with pytest.raises(EngineError, match="without a step"):
        runner.collect()
    runner.execute(step(0, {}))
    runner.execute(step(1, {}))
    with pytest.raises(EngineError, match="2 steps in flight"):
        runner.execute(step(2, {}))


def test_the_oracle_honours_every_limit() -> None:
    model = HashModel(vocab_size=12, eos_every=3)
    eos = model.eos_token_id
    free = model.oracle(PROMPT, PARAMS, 1, 200)
    assert len(free) == 200 and 30 < free.count(eos) < 110
    ended = model.oracle(PROMPT, SamplingParams(max_tokens=None, eos_token_ids=[eos]), 1, 200)
    assert ended == free[: free.index(eos) + 1]
    assert len(model.oracle(PROMPT, SamplingParams(max_tokens=4), 1, 200)) == 4
    held = model.oracle(PROMPT, SamplingParams(max_tokens=None, eos_token_ids=[eos], min_tokens=50), 1, 200)
    assert len(held) >= 50 and eos not in held[:49]
    assert model.oracle(PROMPT, PARAMS, 2, 20) != free[:20]
    assert HashModel(key=b"x", vocab_size=12, eos_every=3).oracle(PROMPT, PARAMS, 1, 20) != free[:20]


def test_faults_are_drawn_from_the_seed_and_repeat() -> None:
    def day(seed: int) -> list[object]:
        harness = SchedulerHarness(faults=Faults(seed=seed, slow_step_rate=0.2, row_error_rate=0.05))
        for index in range(20):
            harness.add(f"r{index}", [index, *PROMPT], max_tokens=10)
        harness.run()
        slow = harness.scheduler.cost_model.coefficients
        return [slow, *((expected.finish, tuple(expected.got)) for expected in harness.expected.values())]

    assert day(1) == day(1) != day(2)
    assert any("ERROR" in repr(entry) for entry in day(1))
