"""What a server tells of itself and of its requests: timing in answers, the console's data, figures under other names."""

import asyncio
import json

import httpx
import pytest

from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.openai.generation import build_timing
from quire.entrypoints.openai.protocol import Timing
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.engine_start import begin_engine, connect_engine
from quire.metrics.prometheus import PrometheusExposition
from quire.outputs import RequestMetrics

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def demo():
    """The demo model's engine with two rows, and the server state that it was started for."""
    state = ServerState(ServerSettings(metrics_names="both"))
    engine_args = AsyncEngineArgs(max_num_seqs=2, max_model_len=2000, num_gpu_blocks_override=128)
    engine = connect_engine(begin_engine(engine_args).result(), state)
    state.engine_or_none = engine
    yield engine, state
    engine.shutdown()


@pytest.fixture
async def client(demo):
    transport = httpx.ASGITransport(build_app(demo[1]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as made:
        yield made


async def ask(client: httpx.AsyncClient, text: str, request_id: str = "", **fields) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}
    response = await client.post(
        "/v1/chat/completions", json=body, headers={"X-Request-Id": request_id} if request_id else {}
    )
    assert response.status_code == 200, response.text
    return response.json()


def check_timing(timing: dict, num_tokens: int) -> None:
    assert set(timing) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"
    }  # fmt: skip
    assert all(value is not None and value >= 0 for value in timing.values())
    running = (timing["time_to_first_token_ms"] + timing["generation_time_ms"]) / 1e3
    assert timing["tokens_per_second"] == pytest.approx(num_tokens / running, rel=0.01)


def test_times_of_several_prompts_are_those_of_all_together_and_missing_moments_are_none():
    parts = [RequestMetrics(1.0, 2.0, 4.0, 4.0, 5, 1.5), RequestMetrics(1.0, 3.0, 5.0, 5.0, 5, 2.0)]
    assert build_timing(parts) == Timing(500.0, 3000.0, 500.0, 750.0, 2.86)
    assert build_timing([RequestMetrics(1.0, 2.0, 2.0, 2.0, 1, 1.5)]) == Timing(500.0, 0.0, 500.0, None, 2.0)
    assert build_timing([RequestMetrics(1.0)]) == Timing()


async def test_a_request_is_told_where_its_time_went_when_it_asks(client):
    answer = await ask(client, "What is 17 + 25?", return_timing=True, ignore_eos=True)
    check_timing(answer["metrics"], 8)
    assert (await ask(client, "What is 17 + 25?"))["metrics"] is None


async def test_a_stream_tells_it_in_its_last_chunk(client):
    for path, prompt, num_tokens in (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 4),
        ("completions", {"prompt": ["one two", "three"]}, 8),
    ):
        body = {**prompt, "max_tokens": 4, "ignore_eos": True, "stream": True, "return_timing": True}
        response = await client.post(f"/v1/{path}", json=body)
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert chunks[-1]["choices"] == [] and not any(chunk.get("metrics") for chunk in chunks[:-1])
        check_timing(chunks[-1]["metrics"], num_tokens)


async def test_a_completion_of_several_prompts_tells_of_all_together(client):
    body = {"prompt": ["one two", "three four"], "max_tokens": 3, "ignore_eos": True, "return_timing": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 6
    check_timing(answer["metrics"], 6)


async def test_the_operator_may_ask_for_all_requests(demo):
    engine, _ = demo
    state = ServerState(ServerSettings(enable_per_request_metrics=True), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
        assert "metrics" in await ask(client, "hi")
        assert (await ask(client, "hi", return_timing=False))["metrics"] is None


async def told(client):
    return (await client.get("/console/state")).json()


async def test_the_console_is_told_what_runs_and_what_has_ended(client):
    await ask(client, "Say hello.", request_id="mine")
    running = asyncio.ensure_future(ask(client, "Count.", request_id="long", max_tokens=1500, ignore_eos=True))
    while not ((state := await told(client))["requests"] and state["requests"][0]["output_tokens"]):
        assert not running.done(), running.result()
        await asyncio.sleep(0.01)
    assert state["model"] == "quire-demo" and state["num_pages"] == 127
    shown = state["requests"][0]
    assert shown["state"] == "decode" and "long" in shown["id"] and shown["prompt_tokens"] > 0
    running.cancel()
    while (state := await told(client))["running"]:
        await asyncio.sleep(0.01)
    assert any("mine" in shown["id"] for shown in state["finished"])
    assert state["steps"] and state["generation_tokens_total"] >= 8 + shown["output_tokens"]
    assert state["prompt_tokens_total"] > 0 and state["uptime_s"] >= 0


async def test_a_request_is_found_by_the_id_of_its_answer_and_by_its_header(client):
    answer = await ask(client, "A prompt of which there is no other: 4711.", request_id="found-me")
    by_answer = (await client.get(f"/console/requests/{answer['id']}")).json()
    by_header = (await client.get("/console/requests/found-me")).json()
    assert by_answer["id"] == by_header["id"] and by_answer["events"] == by_header["events"]
    kinds = [event["kind"] for event in by_answer["events"]]
    assert kinds[:2] == ["queued", "scheduled"] and kinds[-1] == "finished"
    assert by_answer["prefix"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    missing = await client.get("/console/requests/never-seen")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


async def test_a_salt_of_ones_own_is_the_reason_for_a_miss(client):
    text = "The same words, often enough to fill a page of the cache: one two three four five six seven."
    await ask(client, text, request_id="plain")
    await ask(client, text, request_id="salted", cache_salt="s")
    prefix = (await client.get("/console/requests/salted")).json()["prefix"]
    assert prefix["why"] == "cache salt differs" and "plain" in prefix["request"]


async def test_the_console_needs_a_key_as_other_routes_do(demo):
    transport = httpx.ASGITransport(build_app(demo[1], api_keys=["secret"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in ("/console/state", "/console/requests/x"):
            assert (await client.get(path)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await client.get("/console/state", headers=headers)).status_code == 200


async def test_a_core_in_another_process_tells_the_same():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=2, max_model_len=128), core="process")
    try:
        state = ServerState(ServerSettings(), engine)
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            await ask(client, "hi", request_id="far")
            assert (await client.get("/console/requests/far")).json()["is_finished"]
            assert (await client.get("/console/state")).json()["finished"]
    finally:
        engine.shutdown()


async def test_answers_are_counted_by_route_and_kind(demo):
    state = ServerState(ServerSettings(), demo[0])
    app = build_app(state, api_keys=["k"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=60) as client:
        key = {"authorization": "Bearer k"}
        body = {"prompt": "one", "max_tokens": 1}
        for headers in (key, key, {}):
            await client.post("/v1/completions", json=body, headers=headers)
        await client.post("/v1/completions", json={"prompt": {}}, headers=key)
        await client.get("/v1/models/quire-demo", headers=key)
        await client.get("/nowhere/at-all", headers=key)
    exposition = PrometheusExposition(demo[0].metrics, {}, others=[state.http])
    text = exposition.exposition()[0].decode()
    for labels, count in (
        ('handler="/v1/completions",method="POST",status="2xx"', 2),
        ('handler="/v1/completions",method="POST",status="4xx"', 2),
        ('handler="/v1/models/{model}",method="GET",status="2xx"', 1),
        ('handler="none",method="",status="4xx"', 1),
    ):
        assert f"http_requests_total{{{labels}}} {count}.0" in text
    assert 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"} 4.0' in text
    assert "at-all" not in text


async def test_figures_come_under_the_names_that_the_operator_chose(client):
    await ask(client, "hi")
    text = (await client.get("/metrics")).text
    for prefix in ("quire", "vllm"):
        assert f'{prefix}:request_queue_time_seconds_count{{engine="0",model_name="quire-demo"}}' in text
