"""What fills the waiting line, what a tenant may have of it, and what is refused for lack of time."""

import pytest
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config import SchedulerConfig
from quire.core.cost_model import CostModel
from quire.core.policies import policy_class
from quire.core.queue_bounds import QueueBounds, QueueLoad
from quire.errors import CapacityError
from quire.request import EngineRequest, FinishReason, QueueState, Refusal
from quire.sampling_params import SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6]


def model_of(base_ms: float = 10.0, token_ms: float = 1.0, mean_output: int = 20) -> CostModel:
    """A cost model that has seen steps of a device with these costs."""
    model = CostModel()
    for tokens, sequences in ((1, 1), (3, 3), (8, 1), (20, 4), (64, 2)) * 20:
        model.observe(tokens, sequences, 0.0, base_ms + token_ms * tokens)
    for _ in range(50):
        model.observe_output_length(mean_output)
    return model


class Line:
    """Bounds, and the line that they are of."""

    def __init__(self, model: CostModel | None = None, **config: int | float | str) -> None:
        self.now = 100.0
        self.load = QueueLoad()
        settings = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **config})  # type: ignore[arg-type]
        self.bounds = QueueBounds(
            settings,
            policy_class(settings.policy)(settings),
            self.load,
            model or CostModel(),
            1 << 20,
            lambda: self.now,
        )
        self.count = 0

    def add(self, tenant: str = "", weight: float = 1.0, tokens: int = 10, timeout: float = 0.0) -> None:
        """Queue a request, or raise why not."""
        self.count += 1
        deadline = self.now + timeout if timeout else 0.0
        request = EngineRequest(str(self.count), [1] * tokens, tenant=tenant, tenant_weight=weight, deadline=deadline)
        self.bounds.check(request)
        self.load.add(tenant, tokens)

    def fill(self, tenant: str = "", weight: float = 1.0) -> int:
        """Queue as many requests as there is room for; how many that were."""
        before = self.count
        with pytest.raises(CapacityError):
            while True:
                self.add(tenant, weight)
        return self.count - before - 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_shares_one_tenant_may_fill_the_line(policy: str) -> None:
    line = Line(max_num_waiting=40, policy=policy)
    assert line.fill("a") == 40
    assert line.fill("b") == 0


def test_a_flood_leaves_half_of_the_line_and_each_newcomer_finds_room() -> None:
    line = Line(max_num_waiting=60, policy="fair")
    assert line.fill("flood") == 30
    assert line.fill("second") == 15
    line.add("third")
    with pytest.raises(CapacityError, match="30 requests of this tenant wait, which is its share"):
        line.add("flood")


def test_a_heavier_tenant_may_have_more_of_the_line() -> None:
    line = Line(max_num_waiting=60, policy="fair")
    assert line.fill("heavy", weight=3.0) == 45


def test_tokens_fill_the_line_as_well() -> None:
    line = Line(max_waiting_tokens=100)
    assert line.fill() == 10


def test_the_line_is_full_when_it_would_take_too_long_and_the_refusal_says_how_long() -> None:
    line = Line(model_of(), max_waiting_time=3.0)
    count = line.fill()
    # Four rows, outputs of 20 tokens in steps of 14 ms: a row for 70 ms a request; and 1 ms for each of its ten tokens.
    assert 30 <= count <= 40
    with pytest.raises(CapacityError, match="max_waiting_time is 3 s") as refusal:
        line.add()
    assert refusal.value.retry_after is not None and 3.0 < refusal.value.retry_after < 3.5


def test_few_pages_make_the_predicted_wait_longer() -> None:
    model = model_of()
    wide = model.predict_queue_delay(100, 1000, max_num_seqs=64, max_num_batched_tokens=64)
    narrow = model.predict_queue_delay(100, 1000, max_num_seqs=64, max_num_batched_tokens=64, cache_tokens=60)
    assert narrow > 3 * wide


def test_a_request_whose_turn_comes_too_late_is_refused_and_told_by_how_much() -> None:
    line = Line(model_of())
    for _ in range(40):
        line.add()
    line.add(timeout=10.0)
    with pytest.raises(
        CapacityError, match=r"0\.5 s are left of the request's timeout; its turn is predicted"
    ) as refusal:
        line.add(timeout=0.5)
    assert refusal.value.retry_after is not None and refusal.value.retry_after > 1.0


def test_only_what_is_certain_to_start_before_counts_against_a_timeout() -> None:
    fair, urgent = Line(model_of(), policy="fair"), Line(model_of(), policy="priority")
    for line in (fair, urgent):
        for _ in range(40):
            line.add("flood")
    fair.add("quiet", timeout=0.5)
    urgent.add("quiet", timeout=0.5)
    with pytest.raises(CapacityError, match="timeout"):
        fair.add("flood", timeout=0.5)


def test_frontends_hear_at_once_that_the_line_is_full_and_that_it_has_room_again() -> None:
    line = Line(max_num_waiting=4)
    assert line.bounds.news() is None
    assert line.fill() == 4
    assert line.bounds.news() == QueueState(4, 0.0, [""])
    assert line.bounds.news() is None
    line.load.remove("", 10)
    assert line.bounds.news() == QueueState(4, 0.0, [])
    assert line.bounds.news() is None
    line.now += 1.0
    assert line.bounds.news() == QueueState(4, 0.0, [])
    for _ in range(3):
        line.load.remove("", 10)
    assert line.bounds.news() is None


def test_under_fair_frontends_hear_which_tenants_are_full() -> None:
    line = Line(max_num_waiting=60, policy="fair")
    line.fill("flood")
    line.add("quiet")
    news = line.bounds.news()
    assert news is not None and news.closed == ["flood"]


def test_a_line_of_long_prompts_is_told_to_hold_fewer_of_them() -> None:
    line = Line(max_num_waiting=1000, max_waiting_tokens=1000)
    for _ in range(5):
        line.add(tokens=100)
    news = line.bounds.news()
    assert news is not None and news.max_waiting == 10


def test_a_request_that_cannot_end_in_time_is_ended_before_it_runs() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    scheduler = harness.scheduler
    for _ in range(30):
        for tokens in (1, 4, 16):
            scheduler.cost_model.observe(tokens, 1, 0.0, 1000.0 + 100.0 * tokens)
    now = scheduler._timelines.clock()
    harness.add("late", PROMPT, deadline=now + 1.0)
    harness.add("long", PROMPT, min_tokens=30, max_tokens=40, deadline=now + 20.0)
    harness.add("fine", PROMPT, max_tokens=3, deadline=now + 20.0)
    harness.plan()
    (late,), (long,) = harness.expected["late"].outputs, harness.expected["long"].outputs
    assert late.finish_reason is long.finish_reason is FinishReason.ERROR and late.refusal == Refusal(is_late=True)
    assert "are left of the request's timeout, and it is predicted to take" in (late.error or "")
    harness.run()
    assert [new.request_id for step in harness.steps for new in step.new_requests] == ["fine"]


def test_what_was_accepted_before_a_restart_finds_room_in_a_full_line() -> None:
    harness = SchedulerHarness(max_num_waiting=2)
    for index in range(2):
        harness.add(f"r{index}", PROMPT)
    with pytest.raises(CapacityError):
        harness.add("refused", PROMPT)
    again = EngineRequest("again", PROMPT, SamplingParams(max_tokens=2))
    harness.scheduler.add_request(again, again=True)
    assert harness.scheduler.num_waiting == 3
