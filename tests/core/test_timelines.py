"""What the scheduler remembers of requests: their way, the causes of waiting, and where prompts left the prefix cache."""

from typing import Any

import pytest
from tests.oracles.hash_model import HashModel
from tests.oracles.scheduler_harness import SchedulerHarness

from quire.core import request_timeline
from quire.core import timelines as timelines_module
from quire.core.inspection import count_common
from quire.core.output import ModelRunnerOutput

PROMPT = list(range(100, 130))


def timeline(harness: SchedulerHarness, request_id: str) -> dict[str, Any]:
    found = harness.scheduler.inspection.timeline(request_id)
    assert found is not None
    return found


def kinds(shown: dict[str, Any]) -> list[str]:
    return [event["kind"] for event in shown["events"]]


def details(shown: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in shown["events"] if event["kind"] == kind]


def why(harness: SchedulerHarness, request_id: str) -> str:
    return timeline(harness, request_id)["prefix"]["why"]


def test_a_request_is_queued_scheduled_computed_in_chunks_decoded_and_finished() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=16)
    harness.add("a", PROMPT, max_tokens=4)
    harness.run()
    shown = timeline(harness, "a")
    assert kinds(shown) == ["queued", "scheduled", "chunk", "chunk", "first_token", "decode", "finished"]
    chunks = [(chunk["from_token"], chunk["to_token"]) for chunk in details(shown, "chunk")]
    assert chunks == [(0, 16), (16, 30)]
    assert details(shown, "decode")[0]["tokens"] == 3
    assert details(shown, "finished") == [{"reason": "length", "output_tokens": 4}]
    times = [event["t_s"] for event in shown["events"]]
    assert times == sorted(times) and shown["is_finished"] and shown["events_left_out"] == 0


def test_a_request_that_decodes_has_no_event_a_step() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT[:4], max_tokens=40)
    harness.step()
    before = len(timeline(harness, "a")["events"])
    for _ in range(20):
        harness.step()
    assert len(timeline(harness, "a")["events"]) == before
    harness.run()


def test_who_waits_for_a_row_is_told_whom_it_waits_behind() -> None:
    harness = SchedulerHarness(max_num_seqs=1, num_blocks=128)
    for name in "abc":
        harness.add(name, [*PROMPT[:6], ord(name)], max_tokens=8)
    harness.run()
    own = details(timeline(harness, "b"), "stall")
    assert [stall["cause"] for stall in own] == ["rows"] and "behind" not in own[0]
    behind = details(timeline(harness, "c"), "stall")
    assert behind[0]["cause"] == "rows" and behind[0]["behind"] == "b"
    assert "stall" not in kinds(timeline(harness, "a"))


def test_who_waits_for_pages_is_told_so_and_the_preempted_learns_for_whom() -> None:
    harness = SchedulerHarness(num_blocks=17, max_num_seqs=2, prefix_caching=False)
    harness.add("a", PROMPT[:20], max_tokens=40)
    harness.add("b", PROMPT[:20], max_tokens=40)
    harness.run()
    shown = timeline(harness, "b")
    preemption = details(shown, "preempted")[0]
    assert preemption["cause"] == "pages" and preemption["for_request"] == "a" and preemption["computed_tokens"] > 0
    assert "pages" in {stall["cause"] for stall in details(shown, "stall")}
    assert kinds(shown).count("scheduled") == kinds(shown).count("queued") >= 2
    assert kinds(shown)[-1] == "finished"


def test_a_prompt_for_which_the_step_has_no_tokens_left_stalls_once() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=8, max_model_len=128, num_blocks=128)
    harness.add("a", list(range(60)), max_tokens=2)
    harness.step()
    harness.add("b", list(range(200, 220)), max_tokens=2)
    harness.run()
    stalls = details(timeline(harness, "b"), "stall")
    assert [stall["cause"] for stall in stalls] == ["tokens"]


def test_a_follower_names_the_request_that_computes_for_it() -> None:
    harness = SchedulerHarness(
        max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=128, num_blocks=128
    )
    harness.add("lead", list(range(60)), max_tokens=2)
    harness.step()
    harness.add("follow", [*range(56), 7, 7, 7], max_tokens=2)
    harness.run()
    stalls = details(timeline(harness, "follow"), "stall")
    assert {"cause": "common prefix", "request": "lead"}.items() <= stalls[0].items()


def test_siblings_wait_for_the_prompt_and_are_found_together() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=32)
    for index in range(3):
        harness.add(f"chat-1.{index}", PROMPT[:20], max_tokens=2, group_id="chat-1")
    harness.run()
    shown = timeline(harness, "chat-1")
    assert shown["id"] == "chat-1.2" and shown["siblings"] == ["chat-1.0", "chat-1.1"]
    assert details(shown, "stall")[0]["cause"] == "sibling"
    assert harness.scheduler.inspection.timeline("chat") is not None
    assert harness.scheduler.inspection.timeline("cha") is None


def test_where_a_prompt_left_the_cache_is_explained() -> None:
    harness = SchedulerHarness(num_blocks=128)
    harness.add("first", PROMPT, max_tokens=2)
    harness.run()
    harness.add("same", PROMPT, max_tokens=2)
    harness.add("other end", [*PROMPT[:18], *range(12)], max_tokens=2)
    harness.add("salted", PROMPT, max_tokens=2, cache_salt="mine")
    harness.add("short", PROMPT[:4], max_tokens=2)
    harness.add("new", list(range(20)), max_tokens=2)
    harness.add("blind", PROMPT, max_tokens=2, prompt_logprobs=0)
    harness.run()
    assert why(harness, "first") == "never seen" == why(harness, "new")
    assert why(harness, "same") == "nothing left"
    assert why(harness, "salted") == "cache salt differs"
    assert why(harness, "short") == "shorter than a page"
    assert why(harness, "blind") == "not read"
    harness.add("last", [*PROMPT[:22], *range(50, 58)], max_tokens=2)
    harness.run()
    prefix = timeline(harness, "last")["prefix"]
    assert (prefix["common_tokens"], prefix["hit_tokens"]) == (22, 20) and prefix["request"] != "other end"
    prefix = timeline(harness, "other end")["prefix"]
    assert (prefix["why"], prefix["common_tokens"], prefix["hit_tokens"]) == ("differs", 18, 16)
    assert prefix["left_at_token"] == 16 and prefix["request"] in ("first", "same")


def test_pages_that_went_to_others_are_called_evicted_and_a_reset_a_reset() -> None:
    harness = SchedulerHarness(num_blocks=17)
    harness.add("first", PROMPT, max_tokens=2)
    harness.run()
    harness.add("big", list(range(50)), max_tokens=14)
    harness.run()
    harness.add("again", PROMPT, max_tokens=2)
    harness.run()
    prefix = timeline(harness, "again")["prefix"]
    assert prefix["why"] == "evicted" and prefix["request"] == "first"
    harness.scheduler.reset_prefix_cache()
    harness.add("after", PROMPT, max_tokens=2)
    harness.run()
    assert why(harness, "after") == "cache reset"


def test_a_prompt_that_somebody_computes_at_that_moment_is_told_so() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=16, min_common_tokens=1000, num_blocks=128, max_model_len=128)
    harness.add("first", list(range(60)), max_tokens=2)
    harness.add("second", list(range(60)), max_tokens=2)
    harness.run()
    assert why(harness, "second") == "still computed"


def test_without_a_prefix_cache_that_is_the_reason() -> None:
    harness = SchedulerHarness(prefix_caching=False)
    harness.add("a", PROMPT, max_tokens=2)
    assert why(harness, "a") == "cache off"
    harness.run()


def test_a_waiting_request_has_not_been_looked_up() -> None:
    harness = SchedulerHarness()
    harness.add("a", PROMPT, max_tokens=2)
    assert why(harness, "a") == "not looked up yet"
    harness.run()


def test_the_state_lists_steps_live_and_finished_requests() -> None:
    harness = SchedulerHarness(max_num_seqs=1, num_blocks=33)
    harness.add("done", PROMPT[:8], max_tokens=2)
    harness.run()
    harness.add("a", PROMPT[:8], max_tokens=8)
    harness.add("b", PROMPT[:8], max_tokens=8)
    for _ in range(3):
        harness.step()
    state = harness.scheduler.inspection.state()
    assert (state["running"], state["waiting"], state["num_pages"]) == (1, 1, 32)
    assert state["kv_usage"] == pytest.approx(1 - state["free_pages"] / 32)
    assert [(shown["id"], shown["state"]) for shown in state["requests"]] == [("a", "decode"), ("b", "waiting")]
    first = state["requests"][0]
    assert first["cached_tokens"] == 4 and first["computed_tokens"] == 10 and first["output_tokens"] == 3
    assert [shown["id"] for shown in state["finished"]] == ["done"] and state["finished"][0]["output_tokens"] == 2
    assert state["step"] == state["steps"][-1] and state["step"]["num_requests"] == 1
    assert state["prefix_hits"] == 4
    assert (state["prompt_tokens_total"], state["generation_tokens_total"]) == (16, 5)
    harness.run()


def test_a_request_that_fails_or_is_aborted_ends_its_timeline() -> None:
    harness = SchedulerHarness(num_blocks=128)
    harness.add("gone", PROMPT, max_tokens=8)
    harness.step()
    harness.abort(["gone"])
    assert details(timeline(harness, "gone"), "finished")[0]["reason"] == "abort"
    harness.run()


def test_nothing_is_kept_where_that_is_off() -> None:
    harness = SchedulerHarness(record_timelines=False)
    harness.add("a", PROMPT, max_tokens=2)
    harness.step()
    state = harness.scheduler.inspection.state()
    assert [shown["id"] for shown in state["requests"]] == ["a"] and state["running"] == 1
    harness.run()
    assert harness.scheduler.inspection.timeline("a") is None and harness.scheduler.inspection.state()["steps"] == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines_module, "MAX_FINISHED", 3)
    monkeypatch.setattr(request_timeline, "MAX_EVENTS", 6)
    harness = SchedulerHarness(num_blocks=128, max_num_batched_tokens=4)
    for index in range(5):
        harness.add(f"r{index}", [index, *PROMPT], max_tokens=2)
    harness.run()
    kept = harness.scheduler.inspection._timelines.finished
    assert list(kept) == ["r2", "r3", "r4"]
    shown = timeline(harness, "r4")
    assert shown["events_left_out"] > 0 and len(kept["r4"].events) == 6
    assert kinds(shown)[0] == "queued" and kinds(shown)[-1] == "finished"
    monkeypatch.setattr(timelines_module, "MAX_FINISHED_TOKENS", 40)
    harness.add("last", PROMPT, max_tokens=2)
    harness.run()
    assert list(kept) == ["last"]


def test_common_tokens_are_counted_exactly() -> None:
    base = list(range(1000))
    for common in (0, 1, 15, 16, 17, 47, 48, 49, 500, 999, 1000):
        other = [*base[:common], *([-1] * (1000 - common))]
        assert count_common(base, other, 1000) == common
    assert count_common(base, base, 30) == 30 and count_common([], base, 5) == 0


def test_the_model_runner_that_reports_times_shows_them_beside_the_prediction() -> None:
    harness = SchedulerHarness(model=HashModel())
    harness.add("a", PROMPT[:4], max_tokens=60)
    scheduler = harness.scheduler
    for _ in range(20):
        step = scheduler.schedule()
        harness.executor.execute(step)
        result: ModelRunnerOutput = harness.executor.collect()
        result.step_ms = 5.0
        scheduler.update(step, result)
    last = scheduler.inspection.state()["step"]
    assert last["ms"] == 5.0 and last["predicted_ms"] == pytest.approx(5.0, rel=0.05)
