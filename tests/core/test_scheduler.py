import pytest
from tests.oracles.hash_model import HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core.output import ModelRunnerOutput
from quire.errors import CapacityError, ConfigError, EngineError, RequestError
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest, FinishReason

PROMPT = list(range(10))


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=4)
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    chunks = [step.num_scheduled_tokens.tolist() for step in harness.steps if step.total_num_tokens]
    assert chunks == [[4], [4], [2], [1]]


def test_decoding_requests_come_before_a_long_prompt() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=8)
    harness.add("a", PROMPT[:3], max_tokens=20)
    harness.step()
    harness.add("b", list(range(40)), max_tokens=2)
    for _ in range(5):
        assert harness.step().num_scheduled_tokens.tolist() == [1, 7]
    harness.run()


def test_without_chunked_prefill_a_prompt_is_computed_whole_or_waits() -> None:
    harness = SchedulerHarness(enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20)
    for name in "abc":
        harness.add(name, [*PROMPT, ord(name)], max_tokens=2)
    harness.run()
    prefills = [count for step in harness.steps for count in step.num_scheduled_tokens.tolist() if count > 1]
    assert all(count in (11, 3) for count in prefills)  # Whole, or what a cached prefix leaves.


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(32\) must be at least max_model_len \(64\)"):
        SchedulerHarness(enable_chunked_prefill=False)


def test_swapping_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="swap_space"):
        SchedulerHarness(preemption_mode="swap")


def test_a_long_prefill_is_limited_by_its_threshold() -> None:
    harness = SchedulerHarness(long_prefill_token_threshold=3)
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    assert [step.total_num_tokens for step in harness.steps if step.total_num_tokens] == [3, 3, 3, 1]


def test_at_most_so_many_prompts_are_part_way() -> None:
    harness = SchedulerHarness(max_num_partial_prefills=1, max_num_batched_tokens=20, long_prefill_token_threshold=4)
    for name in "abc":
        harness.add(name, [ord(name), *PROMPT], max_tokens=6)
    for _ in range(8):
        harness.step()
        batch = harness.scheduler._batch
        assert sum(batch.computed[row] < batch.prefill_end[row] for row in batch.order().tolist()) <= 1
    harness.run()


def test_rows_bound_how_many_run() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    for index in range(5):
        harness.add(f"r{index}", PROMPT, seed=index)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 3)
    harness.run()


def test_chunks_are_sized_in_milliseconds_once_steps_are_known() -> None:
    harness = SchedulerHarness(max_step_ms=1.2, max_num_batched_tokens=64, max_model_len=400, num_blocks=400)
    for index in range(4):
        harness.add(f"warm{index}", [index] * (17 * index + 5), max_tokens=20)
    harness.run()
    before = len(harness.steps)
    harness.add("long", list(range(300)), max_tokens=1)
    harness.run()
    chunks = [step.total_num_tokens for step in harness.steps[before:] if step.total_num_tokens][:-1]
    # The hash model's step takes 1 + 0.01 * tokens + 0.02 * sequences milliseconds.
    assert chunks and all(12 <= chunk <= 20 for chunk in chunks), chunks


@pytest.mark.parametrize(("waited", "first"), [(0.0, range(80, 115)), (5.0, range(256, 257))])
def test_a_prompt_at_most_doubles_its_neighbours_steps_unless_it_has_waited_for_long(
    waited: float, first: range
) -> None:
    harness = SchedulerHarness(max_step_factor=2.0, max_num_batched_tokens=256, max_model_len=400, num_blocks=400)
    now = harness.scheduler._timelines.clock()
    for index in range(4):
        harness.add(f"warm{index}", [index] * (17 * index + 5), max_tokens=20, arrival_time=now)
    harness.run()
    harness.add("neighbour", PROMPT, max_tokens=60, arrival_time=now)
    for _ in range(3):
        harness.step()
    before = len(harness.steps)
    harness.add("long", list(range(390)), max_tokens=1, arrival_time=now - waited)
    harness.run()
    chunks = [step.total_num_tokens for step in harness.steps[before:] if step.total_num_tokens > 1]
    assert chunks[0] in first, chunks
    assert all(chunk in range(80, 115) for chunk in chunks[1:-1]), chunks


def test_a_prompt_that_disturbs_nobody_takes_the_whole_step() -> None:
    harness = SchedulerHarness(max_step_factor=2.0, max_num_batched_tokens=256, max_model_len=400, num_blocks=400)
    for index in range(4):
        harness.add(f"warm{index}", [index] * (17 * index + 5), max_tokens=20)
    harness.run()
    harness.add("long", list(range(390)), max_tokens=1, arrival_time=harness.scheduler._timelines.clock())
    assert harness.step().total_num_tokens == 256
    harness.run()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_finish_with_the_same_tokens(mode: str, depth: int) -> None:
    harness = SchedulerHarness(
        num_blocks=14,
        num_host_blocks=20 if mode == "swap" else 0,
        preemption_mode=mode,
        depth=depth,  # type: ignore[arg-type]
        prefix_caching=False,
        max_model_len=40,
    )
    for index in range(4):
        harness.add(f"r{index}", [index, *PROMPT], max_tokens=25, seed=index)
    harness.run()
    assert harness.num_preemptions >= 2
    told = [expected.outputs[-1].num_preemptions for expected in harness.expected.values()]
    assert sum(told) == harness.num_preemptions, "each request's last output tells how often it was preempted"
    copies = sum(len(step.swap_ins) for step in harness.steps)
    assert (copies > 0) == (mode == "swap")
    assert copies == sum(len(step.swap_outs) for step in harness.steps)


def test_a_swapped_request_computes_nothing_again() -> None:
    harness = SchedulerHarness(
        num_blocks=14, num_host_blocks=40, preemption_mode="swap", prefix_caching=False, max_model_len=40
    )
    for index in range(3):
        harness.add(f"r{index}", [index, *PROMPT], max_tokens=25)
    harness.run()
    assert harness.num_preemptions
    assert sum(step.total_num_tokens for step in harness.steps) == 3 * (11 + 24)


def test_a_full_host_falls_back_to_recomputing() -> None:
    harness = SchedulerHarness(
        num_blocks=14, num_host_blocks=2, preemption_mode="swap", prefix_caching=False, max_model_len=40
    )
    for index in range(3):
        harness.add(f"r{index}", [index, *PROMPT], max_tokens=25)
    harness.run()
    assert harness.num_preemptions and not any(step.swap_outs for step in harness.steps)


def test_the_lowest_ranked_gives_way() -> None:
    harness = SchedulerHarness(num_blocks=14, policy="priority", max_model_len=40, prefix_caching=False)
    for index, priority in enumerate([5, 0, 3]):
        harness.add(f"p{priority}", [index, *PROMPT], max_tokens=25, priority=priority)
    order = []
    while harness.scheduler.has_work():
        harness.step()
        order += [
            name for name, expected in harness.expected.items() if expected.finish is not None and name not in order
        ]
    assert harness.num_preemptions and order == ["p0", "p3", "p5"]


def test_priority_admits_the_urgent_first() -> None:
    harness = SchedulerHarness(policy="priority", max_num_seqs=1)
    for priority in (2, 0, 1):
        harness.add(f"p{priority}", PROMPT, priority=priority, max_tokens=1)
    harness.run()
    admitted = [new.request_id for step in harness.steps for new in step.new_requests]
    assert admitted == ["p0", "p1", "p2"]


def test_fair_admits_a_quiet_tenant_beside_a_flood() -> None:
    harness = SchedulerHarness(policy="fair", max_num_seqs=1, prefix_caching=False)
    for index in range(120):
        harness.add(f"flood{index}", PROMPT, tenant="flood", max_tokens=1)
    harness.add("quiet", PROMPT, tenant="quiet", max_tokens=1)
    harness.run()
    admitted = [new.request_id for step in harness.steps for new in step.new_requests]
    assert admitted.index("quiet") < 60


def test_fair_computes_the_prompt_of_a_tenant_who_is_crowded_out_without_the_crowd() -> None:
    harness = SchedulerHarness(policy="fair", max_num_seqs=8, prefix_caching=False)

    for index in range(6):
        harness.add(f"flood{index}", PROMPT, tenant="flood", max_tokens=20)
    crowd = [harness.step().rows.tolist() for _ in range(3)][-1]
    assert len(crowd) == 6
    harness.add("flood", PROMPT, tenant="flood", max_tokens=3)
    harness.add("quiet", PROMPT, tenant="quiet", max_tokens=9)
    alone, *together = [harness.step() for _ in range(3)]
    assert alone.total_num_tokens == len(PROMPT) and len(alone.rows) == 1 and alone.rows[0] not in crowd
    assert all({*crowd, *alone.rows.tolist()} <= set(step.rows.tolist()) for step in together)
    harness.add("second", PROMPT, tenant="quiet", max_tokens=3)  # beside one that runs already
    assert len(harness.step().rows) > 6
    harness.run()


def test_fair_lets_a_crowd_sit_out_no_two_steps_in_a_row() -> None:
    harness = SchedulerHarness(policy="fair", max_num_seqs=8, prefix_caching=False)
    for index in range(6):
        harness.add(f"flood{index}", PROMPT, tenant="flood", max_tokens=20)
    assert [len(harness.step().rows) for _ in range(3)][-1] == 6
    lengths = list[int]()
    for index in range(4):
        harness.add(f"quiet{index}", PROMPT, tenant=f"quiet{index}", max_tokens=1)
        lengths.append(len(harness.step().rows))
    assert lengths == [1, 7, 1, 7]
    harness.run()


@pytest.mark.parametrize("collected_between", [False, True])
def test_an_abort_in_flight_frees_pages_and_row_once_and_only_when_the_step_is_collected(
    collected_between: bool,
) -> None:
    harness = SchedulerHarness(depth=2)
    harness.add("a", PROMPT, max_tokens=20)
    harness.plan()
    if collected_between:
        harness.plan()
        harness.collect()
    free = harness.scheduler.kv.pool.num_free
    harness.abort(["a", "a", "unknown"])
    assert harness.scheduler.kv.pool.num_free == free and 0 not in harness.scheduler._batch._free_rows
    assert harness.scheduler.num_running == 1 and not harness.scheduler.has_unfinished()
    harness.add("b", PROMPT, max_tokens=2)
    step = harness.plan()
    assert [new.row for new in step.new_requests] != [0] and not step.finished_rows
    harness.run()


def test_an_end_of_sequence_found_late_discards_the_surplus_token() -> None:
    model = HashModel(vocab_size=20, eos_every=3)
    harness = SchedulerHarness(model=model, depth=2)
    for seed in range(6):
        harness.add(f"r{seed}", PROMPT, seed=seed, max_tokens=30, eos_token_ids=[model.eos_token_id])
    harness.run()
    assert any(expected.finish is FinishReason.STOP for expected in harness.expected.values())
    assert sum(len(expected.got) for expected in harness.expected.values()) < harness.num_samples


def test_the_last_token_allowed_is_known_ahead_so_that_nothing_is_computed_for_nothing() -> None:
    harness = SchedulerHarness(depth=2)
    harness.add("a", PROMPT, max_tokens=5)
    harness.run()
    assert sum(step.total_num_tokens for step in harness.steps) == 10 + 4


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_siblings_share_the_prompts_full_pages(caching: bool, windows: tuple[int, ...]) -> None:
    harness = SchedulerHarness(model=HashModel(windows=windows), prefix_caching=caching)
    for seed in range(4):
        harness.add(f"r{seed}", PROMPT, seed=seed, group_id="g")
    assert harness.step().total_num_tokens == 10
    step = harness.step()
    assert sorted(step.num_scheduled_tokens.tolist()) == [1, 2, 2, 2]  # One decodes; three compute the tail.
    harness.run()
    assert [harness.expected[f"r{seed}"].num_cached_tokens for seed in range(4)] == [0, 8, 8, 8]


def test_a_sibling_leads_when_the_first_is_aborted() -> None:
    harness = SchedulerHarness(prefix_caching=False, max_num_batched_tokens=4)
    for seed in range(3):
        harness.add(f"r{seed}", PROMPT, seed=seed, group_id="g")
    harness.step()
    harness.abort(["r0"])
    harness.run()
    assert [harness.expected[f"r{seed}"].num_cached_tokens for seed in (1, 2)] == [0, 8]


def test_a_prefix_is_found_again_but_not_across_salts_nor_when_opted_out() -> None:
    harness = SchedulerHarness()
    harness.add("first", PROMPT)
    harness.run()
    harness.add("same", PROMPT)
    harness.add("salted", PROMPT, cache_salt="s")
    harness.add("opted out", PROMPT, skip_reading_prefix_cache=True)
    harness.add("prompt logprobs", PROMPT, prompt_logprobs=0)
    harness.run()
    cached = {name: expected.num_cached_tokens for name, expected in harness.expected.items()}
    assert cached == {
        "first": 0,
        "same": 8,
        "salted": 0,
        "opted out": 0,
        "prompt logprobs": 0,
    }
    assert harness.scheduler.stats().prefix_cache_hits == 8


def test_after_a_reset_nothing_old_is_found_not_even_what_running_requests_compute_later() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=4)
    harness.add("running", PROMPT, max_tokens=10)
    harness.step()
    harness.step()
    assert harness.scheduler.kv.pool.num_cached > 0
    harness.scheduler.reset_prefix_cache()
    harness.run()
    assert harness.scheduler.kv.pool.num_cached == 0
    harness.add("later", PROMPT)
    harness.run()
    assert harness.expected["later"].num_cached_tokens == 0


def test_stop_tokens_wait_for_min_tokens_and_are_named() -> None:
    harness = SchedulerHarness(model=HashModel(vocab_size=6))
    harness.add("a", PROMPT, max_tokens=40, stop_token_ids=[0, 1, 2], min_tokens=7)
    harness.run()
    expected = harness.expected["a"]
    assert expected.finish is FinishReason.STOP and expected.stop_reason == expected.got[-1] and len(expected.got) >= 7


def test_many_stop_ids_are_honoured_too() -> None:
    harness = SchedulerHarness(model=HashModel(vocab_size=60))
    harness.add("a", PROMPT, max_tokens=40, stop_token_ids=list(range(30)))
    harness.run()
    assert harness.expected["a"].finish is FinishReason.STOP


def test_a_request_that_fills_the_model_ends_by_length() -> None:
    harness = SchedulerHarness(max_model_len=16)
    harness.add("a", PROMPT, max_tokens=None)
    harness.run()
    assert len(harness.expected["a"].got) == 6 and harness.expected["a"].finish is FinishReason.LENGTH


def test_prompt_logprobs_of_all_chunks_come_once_with_the_first_token() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=3)
    harness.add("a", PROMPT, prompt_logprobs=1, logprobs=0, max_tokens=3)
    harness.run()
    first, *rest = harness.expected["a"].outputs
    assert first.prompt_logprobs is not None and [entry[0] for entry in first.prompt_logprobs.token_ids] == PROMPT[1:]
    assert len(rest) == 2 and all(output.prompt_logprobs is None for output in rest)
    assert [len(output.logprobs.token_ids) for output in [first, *rest] if output.logprobs is not None] == [1, 1, 1]


def test_a_pooling_request_ends_with_its_vector() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=4)
    request = EngineRequest(request_id="p", prompt_token_ids=PROMPT, pooling_params=PoolingParams())
    harness.add_request(request)
    harness.run()
    assert harness.expected["p"].outputs[0].pooled and harness.expected["p"].finish is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2])
def test_where_every_token_sees_every_other_a_prompt_is_one_step_and_nothing_follows(depth: int) -> None:
    harness = SchedulerHarness(
        enable_chunked_prefill=False, prefix_caching=False, max_num_batched_tokens=64, num_blocks=40, depth=depth,
        long_prefill_token_threshold=8, max_step_ms=0.1,
    )  # fmt: skip
    lengths = [64, 1, 30, 40, 17, 63, 9]
    for index, length in enumerate(lengths):
        request = EngineRequest(f"p{index}", [index] * length, pooling_params=PoolingParams())
        harness.add_request(request)
    harness.run()
    assert [count for step in harness.steps for count in step.num_scheduled_tokens.tolist()] == lengths
    assert all(expected.finish is FinishReason.STOP for expected in harness.expected.values())


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt is empty"),
        (list(range(64)), {}, "prompt has 64 tokens; max_model_len is 64"),
        (PROMPT, {"resumed_token_ids": [1] * 8}, "leaves nothing to generate"),
        (list(range(40)), {"max_tokens": 20}, "takes 15 KV-cache pages of 4 tokens, and the pool has 12"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    prompt: list[int], fields: dict[str, object], message: str
) -> None:
    harness = SchedulerHarness(num_blocks=13)
    with pytest.raises(RequestError, match=message):
        harness.add("a", prompt, **fields)
    assert not harness.scheduler.has_unfinished()


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT)
    with pytest.raises(RequestError, match="request_id 'a' is in use"):
        harness.scheduler.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPT))
    harness.run()
    harness.add("a", PROMPT)
    harness.run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_num_waiting": 2}, "max_num_waiting is 2"), ({"max_waiting_tokens": 25}, "max_waiting_tokens is 25")],
)
def test_a_full_queue_says_when_to_come_back(settings: dict[str, int], message: str) -> None:
    harness = SchedulerHarness(**settings)  # type: ignore[arg-type]
    harness.add("a", PROMPT)
    harness.add("b", PROMPT)
    with pytest.raises(CapacityError, match=message) as refusal:
        harness.add("c", PROMPT)
    assert refusal.value.retry_after and refusal.value.retry_after >= 1.0
    harness.run()


def test_a_result_out_of_order_is_an_error() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT)
    step = harness.scheduler.schedule()
    with pytest.raises(EngineError, match="not the oldest"):
        harness.scheduler.update(step, ModelRunnerOutput(step_id=7, rows=step.rows, token_ids=step.rows))


def test_a_request_without_a_token_in_the_result_fails_alone() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT)
    step = harness.scheduler.schedule()
    outputs = harness.scheduler.update(
        step, ModelRunnerOutput(step_id=step.step_id, rows=step.rows[:0], token_ids=step.rows[:0])
    )
    assert outputs.outputs[0].finish_reason is FinishReason.ERROR and "no token" in (outputs.outputs[0].error or "")


def test_an_empty_step_may_be_skipped_and_nothing_in_it_is_lost() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    assert harness.scheduler.schedule().total_num_tokens == 0
    harness.add("b", PROMPT, max_tokens=1)
    assert harness.plan().finished_rows == [0]
    harness.run()


def test_a_decode_step_reports_in_columns() -> None:
    harness = SchedulerHarness()
    for name in "ab":
        harness.add(name, PROMPT, max_tokens=5)
    harness.step()
    harness.plan()
    outputs = harness.collect()
    assert outputs.plain_ids == ["a", "b"] and len(outputs.plain_tokens) == 2 and not outputs.outputs


def test_a_delay_factor_lets_prompts_gather() -> None:
    harness = SchedulerHarness(delay_factor=2.0)
    now = [100.0]
    harness.scheduler._delay._clock = lambda: now[0]
    harness.add("a", PROMPT, arrival_time=100.0, max_tokens=30)
    harness.step()
    now[0] = 101.0  # The first prompt took a second: the next waits two.
    harness.add("b", PROMPT, arrival_time=100.9)
    assert len(harness.step().rows) == 1
    now[0] = 102.8
    harness.add("c", PROMPT, arrival_time=102.7)
    assert len(harness.step().rows) == 1
    now[0] = 103.0
    assert len(harness.step().rows) == 3
    harness.run()


@pytest.mark.parametrize(("watermark", "together"), [(0.0, 2), (0.5, 1)])
def test_a_share_of_the_pages_stays_free_when_a_request_starts_beside_others(watermark: float, together: int) -> None:
    harness = SchedulerHarness(watermark=watermark, num_blocks=12, prefix_caching=False)
    harness.add("a", list(range(40)), max_tokens=2)  # more than half of the pages: alone it may have them
    assert len(harness.step().rows) == 1
    harness.run()
    for name in "bc":
        harness.add(name, list(range(14)), max_tokens=2)
    assert len(harness.step().rows) == together
    harness.run()


def test_whole_prompts_are_not_held_back_by_a_time_limit() -> None:
    harness = SchedulerHarness(
        enable_chunked_prefill=False, max_num_batched_tokens=64, max_step_ms=1.01, prefix_caching=False
    )
    for index in range(30):
        harness.add(f"r{index}", [index] * (index + 5), max_tokens=4)
    harness.run()


def test_a_swapped_request_keeps_no_pages_that_its_window_has_passed() -> None:
    """Else it would need more pages when it starts again than it was let in for."""
    model = HashModel(windows=(5,))
    harness = SchedulerHarness(model=model, block_size=1, num_blocks=64, num_host_blocks=60, preemption_mode="swap")
    harness.add("r", list(range(24)))
    harness.step()
    request = harness.scheduler._requests["r"]
    (group,) = harness.scheduler.kv._rules
    assert request.num_computed_tokens == 24 == len(request.block_ids[0])
    swapped = harness.scheduler._saver.give_up(request)
    assert 0 < len(swapped) == 24 - group.first_kept_block(24) <= 5
