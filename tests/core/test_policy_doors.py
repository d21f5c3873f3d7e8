"""A scheduling policy of one's own: it holds requests back, makes steps smaller, and rules of a layer's own keep its pages."""

from collections.abc import Callable

import msgspec
import pytest
from tests.oracles.installed_plugins import restore
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheGroup, KVCacheSpec, KVKind
from quire.core.kv_groups import RULES, FullRules, SlidingWindowRules, group_rules
from quire.core.kv_planner import plan_kv_cache
from quire.core.policies import POLICIES, SchedulingPolicy
from quire.errors import ConfigError
from quire.request import EngineRequest

SPEC = KVCacheSpec(KVKind.FULL, 16, 512, 2, 64, "bfloat16")


class OneByOne(SchedulingPolicy):
    """Nobody starts while another one runs."""

    def may_admit(self, request: EngineRequest, num_running: int) -> bool:
        assert num_running > 0, "not asked while nothing runs"
        return False


class SmallSteps(SchedulingPolicy):
    """At most five tokens a step."""

    def step_tokens(self, limit: int, num_running: int) -> int:
        return min(limit, 5)


def drive(policy: type[SchedulingPolicy], monkeypatch: pytest.MonkeyPatch) -> SchedulerHarness:
    restore(monkeypatch, POLICIES)
    POLICIES.register("ours", policy, owner="a test")
    harness = SchedulerHarness(policy="ours", max_num_batched_tokens=32)  # type: ignore[arg-type]
    for number in range(4):
        harness.add(f"r{number}", list(range(1 + number, 14 + number)), max_tokens=4)
    harness.run()
    return harness


def test_a_policy_that_admits_nobody_beside_another_runs_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = drive(OneByOne, monkeypatch)
    assert max(len(step.rows) for step in harness.steps) == 1


def test_a_prompt_in_the_background_goes_on_while_a_policy_admits_nobody_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore(monkeypatch, POLICIES)
    POLICIES.register("ours", OneByOne, owner="a test")
    harness = SchedulerHarness(policy="ours", max_num_batched_tokens=8)  # type: ignore[arg-type]
    harness.add("line", list(range(50)), max_tokens=2, is_background=True)
    harness.step()
    harness.add("online", [9, *range(6)], max_tokens=2)
    harness.run()  # says if nothing runs: once it sat out for ever for the request that waited for its end


def test_a_policys_steps_have_as_many_tokens_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = drive(SmallSteps, monkeypatch)
    assert max(step.total_num_tokens for step in harness.steps) == 5


def test_the_usual_policy_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = drive(SchedulingPolicy, monkeypatch)
    assert max(step.total_num_tokens for step in harness.steps) > 5
    assert max(len(step.rows) for step in harness.steps) > 1


def test_a_layer_with_rules_of_its_own_has_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(monkeypatch, RULES)

    class Sinks(SlidingWindowRules):
        """A window, and the first page."""

        def first_visible_block(self, num_computed_tokens: int) -> int:
            return 0

    RULES.register("sinks", Sinks, owner="a test")
    own = msgspec.structs.replace(SPEC, window=32, rules="sinks")
    plan = plan_kv_cache([SPEC, own, SPEC, own], 1 << 20, CacheConfig(), SchedulerConfig(max_model_len=64))
    assert [group.layers for group in plan.groups] == [(0, 2), (1, 3)]
    assert [type(group_rules(group)) for group in plan.groups] == [FullRules, Sinks]
    sent = msgspec.convert(msgspec.to_builtins(plan), type(plan))
    assert sent == plan


def test_rules_that_nobody_registered_are_refused() -> None:
    group = KVCacheGroup(msgspec.structs.replace(SPEC, rules="sink"), (0,))
    with pytest.raises(ConfigError, match="rules='sink' is not known"):
        group_rules(group)


def test_built_in_rules_are_replaced_only_by_who_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(monkeypatch, RULES)
    with pytest.raises(ConfigError, match="override=True"):
        RULES.register("full", SlidingWindowRules, owner="a test")
    RULES.register("full", SlidingWindowRules, owner="a test", override=True)
    assert isinstance(group_rules(KVCacheGroup(SPEC, (0,))), SlidingWindowRules)


def one_each(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    return tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))


@pytest.mark.parametrize(
    ("group", "layers"),
    [(one_each, "each"), (lambda specs: one_each(specs)[1:], "1, 2"), (lambda specs: one_each(specs) * 2, "0, 0")],
)
def test_a_platform_groups_layers_and_every_layer_is_in_one_group(
    group: Callable[[list[KVCacheSpec]], tuple[KVCacheGroup, ...]], layers: str
) -> None:
    def plan() -> list[tuple[int, ...]]:
        made = plan_kv_cache([SPEC] * 3, 1 << 20, CacheConfig(), SchedulerConfig(max_model_len=64), group=group)
        return [each.layers for each in made.groups]

    if layers == "each":
        assert plan() == [(0,), (1,), (2,)]
        return
    with pytest.raises(ConfigError, match=rf"groups of layers \[{layers}.*each of 3 layers"):
        plan()
