"""Input preparation against a slow loop over tokens, for drawn steps over drawn rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.helpers import make_step, new_request

from quire.core.output import SchedulerOutput
from quire.worker.batch_state import BatchState
from quire.worker.input_prep import InputPreparation

BLOCK_SIZE = 4
MAX_LEN = 40
MAX_ROWS = 6
GROUPS = 2


def expected_tensors(state: BatchState, plan: SchedulerOutput, computed: dict[int, int]) -> dict[str, list[int]]:
    """One token after another, from the definitions in the attention interface."""
    expected: dict[str, list[int]] = {
        "input_ids": [], "positions": [], "slots0": [], "slots1": [], "query_start": [0], "seq_lens": [], "logits": [],
    }  # fmt: skip
    for row, count, needs in zip(plan.rows, plan.num_scheduled_tokens, plan.needs_sample, strict=True):
        for position in range(computed[row], computed[row] + count):
            expected["input_ids"].append(int(state.token_ids_RL[row, position]))
            expected["positions"].append(position)
            for group in range(GROUPS):
                page = int(state.tables_RP[group][row, position // BLOCK_SIZE])
                expected[f"slots{group}"].append(page * BLOCK_SIZE + position % BLOCK_SIZE)
        expected["query_start"].append(len(expected["positions"]))
        expected["seq_lens"].append(computed[row] + int(count))
        if needs:
            expected["logits"].append(len(expected["positions"]) - 1)
    return expected


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
    """Rows as (tokens, computed), and steps as lists of (row, tokens)."""
    rows = [draw(st.tuples(st.integers(1, 20), st.integers(0, 3))) for _ in range(MAX_ROWS)]
    steps = draw(
        st.lists(
            st.lists(
                st.tuples(st.integers(0, MAX_ROWS - 1), st.sampled_from([1, 1, 1, 2, 5])),
                min_size=1,
                max_size=MAX_ROWS,
                unique_by=lambda item: item[0],
            ),
            min_size=1,
            max_size=5,
        )
    )
    return rows, steps


@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_every_tensor_equals_the_slow_loops(
    scenario: tuple[list[tuple[int, int]], list[list[tuple[int, int]]]],
) -> None:
    rows, steps = scenario
    state = BatchState(MAX_ROWS, MAX_LEN, BLOCK_SIZE, GROUPS)
    inputs = InputPreparation(state, MAX_ROWS * 5, BLOCK_SIZE)
    computed = {}
    for row, (known, done) in enumerate(rows):
        tokens = [100 * row + position for position in range(MAX_LEN)]
        pages = [[1 + group * 1000 + row * 20 + page for page in range(10)] for group in range(GROUPS)]
        state.add_row(new_request(row, tokens, pages, computed=min(done, known)))
        computed[row] = min(done, known)
    for items in steps:
        scheduled = [(row, min(count, MAX_LEN - computed[row]), (row + count) % 3 > 0) for row, count in items]
        scheduled = [item for item in scheduled if item[1] > 0]
        if not scheduled:
            continue
        plan = make_step(scheduled)
        expected = expected_tensors(state, plan, computed)
        batch = inputs.prepare(plan)
        step, tokens, requests = inputs.step, plan.total_num_tokens, len(plan.rows)
        assert step.input_ids[:tokens].tolist() == expected["input_ids"]
        assert step.positions[:tokens].tolist() == expected["positions"]
        assert step.logits_index[: step.num_logits].tolist() == expected["logits"]
        assert (step.num_tokens, step.num_logits) == (tokens, len(expected["logits"]))
        for group, metadata in enumerate(step.attention):
            assert metadata.slot_mapping[:tokens].tolist() == expected[f"slots{group}"]
            assert metadata.query_start[: requests + 1].tolist() == expected["query_start"]
            assert metadata.seq_lens[:requests].tolist() == expected["seq_lens"]
            assert metadata.rows[:requests].tolist() == plan.rows.tolist()
            longest = (int(plan.num_scheduled_tokens.max()), max(expected["seq_lens"]))
            assert metadata.shape.tolist() == [tokens, requests, *longest]
            assert (metadata.num_tokens, metadata.num_requests) == (tokens, requests)
            assert (metadata.max_query_len, metadata.max_seq_len) == longest
        sampling = [index for index in range(requests) if plan.needs_sample[index]]
        assert batch.rows_S.tolist() == plan.rows[sampling].tolist()
        assert batch.positions_S.tolist() == [expected["seq_lens"][index] for index in sampling]
        for row, count, _ in scheduled:
            computed[row] += count
            assert state.num_computed_R[row] == computed[row]


def test_a_decode_step_reads_the_token_that_was_sampled_last() -> None:
    state = BatchState(2, MAX_LEN, BLOCK_SIZE, 1)
    inputs = InputPreparation(state, 8, BLOCK_SIZE)
    state.add_row(new_request(1, [5, 6, 7], [[3]]))
    batch = inputs.prepare(make_step([(1, 3, True)]))
    state.append_tokens(batch.rows_S, batch.positions_S, np.array([42], dtype=np.int32))
    inputs.prepare(make_step([(1, 1, True)]))
    assert inputs.step.input_ids[0] == 42
    assert inputs.step.positions[0] == 3
    assert state.num_tokens_R[1] == 4


def test_pages_are_appended_behind_those_of_the_row_and_a_new_owner_starts_afresh() -> None:
    state = BatchState(2, MAX_LEN, BLOCK_SIZE, 2)
    state.add_row(new_request(0, [1] * 9, [[4, 5, 6], [0, 0, 8]]))
    state.append_pages(0, 0, [9])
    state.append_pages(0, 1, [10, 11])
    assert state.tables_RP[0][0, :4].tolist() == [4, 5, 6, 9]
    assert state.tables_RP[1][0, :5].tolist() == [0, 0, 8, 10, 11]
    state.remove_row(0)
    state.add_row(new_request(0, [1, 2], [[7], [3]], computed=1))
    state.append_pages(0, 0, [2])
    assert state.tables_RP[0][0, :2].tolist() == [7, 2]
    assert state.num_computed_R[0] == 1


def test_the_longest_context_and_one_overshooting_token_fit() -> None:
    state = BatchState(1, 8, BLOCK_SIZE, 1)
    state.add_row(new_request(0, list(range(8)), [[1, 2]]))
    for position in (8, 9):
        state.append_tokens(
            np.zeros(1, dtype=np.int32), np.array([position], dtype=np.int32), np.array([1], dtype=np.int32)
        )
    assert state.tables_RP[0].shape[1] * BLOCK_SIZE >= 10
