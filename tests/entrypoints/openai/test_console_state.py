"""What `/console/state` tells of refusals, tenants and events, also where a server has several processes."""

import msgspec
import pytest

from quire.entrypoints.http.call import call_app
from quire.entrypoints.http.siblings import OWN
from quire.entrypoints.server.app import build_app
from quire.errors import CapacityError, EngineDeadError, RequestError
from quire.metrics.engine_metrics import FinishedRequest
from quire.metrics.events import Event, EventKind
from quire.metrics.tenants import TenantFigures

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_which_there_is_no_room_is_an_event(server, stream):
    async with server() as s:
        s.engine.failure = CapacityError("the queue is full")
        assert (await s.chat(stream=stream)).status_code == 429
        assert (await s.complete(stream=stream)).status_code == 429
        s.engine.failure = RequestError("wrong")
        assert (await s.chat(stream=stream)).status_code == 400
        s.engine.failure = None
        state = (await s.client.get("/console/state")).json()
    (event,) = state["events"]
    assert (event["kind"], event["text"], event["count"]) == ("refusal", "the queue is full", 2)
    assert state["event_totals"] == {"refusal": 2}
    assert state["tenants"]["default"] == {"requests": 0, "prompt_tokens": 0, "generation_tokens": 0, "refused": 2}


async def test_probes_are_answered_while_the_queue_is_full(server):
    async with server() as s:
        s.engine.check_queue = lambda *_: (_ for _ in ()).throw(CapacityError("the queue is full"))
        for path in ("/ready", "/health", "/live", "/ping"):
            assert (await s.client.get(path)).status_code == 200, path
        assert (await s.chat()).status_code == 429
        assert s.engine.metrics.events.totals == {EventKind.REFUSAL: 1}


async def test_a_line_of_a_batch_that_waits_for_room_is_no_refused_request(server):
    async with server() as s:
        s.engine.failure = CapacityError("the queue is full")
        answer = await call_app(build_app(s.state), "POST", "/v1/completions", b'{"prompt": "a"}')
        assert answer.status == 429 and not s.engine.metrics.events.totals


class Others:
    """Two other processes; what they were asked."""

    def __init__(self, answer: bytes) -> None:
        self.asked: list[str] = []
        self._answer = answer

    async def ask(self, path: str) -> list[bytes]:
        self.asked.append(path)
        return [self._answer, self._answer]


async def test_the_process_that_is_asked_adds_up_all_of_them(server):
    async with server() as s:
        metrics = s.engine.metrics
        metrics.events.add(EventKind.RESTART, "the core was killed")
        metrics.record_finished(FinishedRequest("stop", 10, 4, scheduled=0.1, most_tokens=4, tenant="a"))
        answer = (await s.client.get(f"/console/state?{OWN}=1")).content
        s.state.siblings = others = Others(answer)
        metrics.record_refusal("full", "b")
        state = (await s.client.get("/console/state")).json()
    assert others.asked == ["/console/state"] and "model" not in msgspec.json.decode(answer)
    kinds = [msgspec.convert(event, Event).kind for event in state["events"]]
    assert kinds == [EventKind.RESTART, EventKind.REFUSAL]
    assert state["event_totals"] == {"restart": 1, "refusal": 1}
    rows = msgspec.convert(state["tenants"], dict[str, TenantFigures])
    assert rows == {"a": TenantFigures(3, 30, 12, 0), "b": TenantFigures(refused=1)}


@pytest.mark.parametrize("error", [CapacityError("the engine core is started again"), EngineDeadError("it died")])
async def test_while_no_core_answers_there_is_what_happened_and_why(server, error):
    async with server() as s:
        s.engine.events.add(EventKind.RESTART, "the core was killed")
        s.engine.failure = error
        state = (await s.client.get("/console/state")).json()
        assert state["problem"] == str(error) and [event["kind"] for event in state["events"]] == ["restart"]
        s.engine.failure = None
        assert "problem" not in (await s.client.get("/console/state")).json()


async def test_the_page_is_told_what_the_model_can_do(server):
    async with server() as s:
        told = (await s.client.get("/console/abilities")).json()
    assert told == {"model": told["model"], "tasks": [], "scores": False, "media": []}


async def test_first_words_and_the_history_of_all_processes_are_shown(server):
    async with server() as s:
        s.engine.metrics.counts["generation_tokens"] = 3
        s.engine.metrics.history.note(1, 0, 0.5, 3)
        s.engine.first_words["a"] = "What is"
        answer = (await s.client.get(f"/console/state?{OWN}=1")).content
        s.state.siblings = Others(answer)
        state = (await s.client.get("/console/state")).json()
    assert state["first_words"] == {"a": "What is"}
    assert [(slot[1], slot[4]) for slot in state["history"]] == [(1, 9)] and state["history_every_s"] == 5


async def test_a_server_finds_what_its_requests_waited_for(server):
    async def inspect():
        ended = [{"id": name} for name in ("a", "b", "old", "gone")]
        return {"running": 1, "waiting": 0, "kv_usage": 0.5, "requests": [], "finished": ended}

    async def timeline(name):
        if name == "gone":
            return None
        stall = {"kind": "stall", "detail": {"cause": "rows", "s": 3.0}}
        prefix = {"why": "evicted", "prompt_tokens": 4000, "hit_tokens": 1000}
        return {"arrived_ago_s": 9e9 if name == "old" else 5.0, "events": [{"kind": "queued"}, stall], "prefix": prefix}

    async with server() as s:
        s.engine.inspect, s.engine.timeline = inspect, timeline
        s.engine.metrics.record_refusal("full")
        told = (await s.client.get("/console/findings")).json()
        s.state.siblings = Others(msgspec.json.encode(s.engine.metrics.counters()))
        both = (await s.client.get("/console/findings")).json()
    found = {each["check"]: each for each in told["findings"]}
    assert {check for check, each in found.items() if each["state"] == "look"} == {
        "refusals",
        "stalls",
        "prefix misses",
    }
    assert found["stalls"]["seen"] == "the last 2 requests waited for: rows 6.0 s"
    assert found["prefix misses"]["seen"] == "tokens of the last 2 prompts: evicted 6,000"
    assert "3 requests" in next(each["seen"] for each in both["findings"] if each["check"] == "refusals")
