"""`/v1/responses` in this process: its own shape, failures, background work, draining, and whatever a client may send."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.entrypoints.openai.conftest import serve
from tests.entrypoints.openai.test_openai_fuzz import JSON
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.responses.prepare import prepare_response
from quire.entrypoints.responses.protocol import InputTokensRequest, ResponsesRequest
from quire.entrypoints.responses.run import BackgroundRun
from quire.errors import CapacityError, EngineError

BODY = {"input": "hi", "max_output_tokens": 4}
BACKGROUND = {**BODY, "background": True}


def events_of(text):
    """The events of a stream; each one's line says its type too."""
    found = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


async def until_over(s, response_id):
    """The response when its work has ended."""
    run = s.state.background.get(response_id)
    async for _ in run.follow() if run else _nothing():
        pass
    return (await s.client.get(f"/v1/responses/{response_id}")).json()


async def _nothing():
    return
    yield


@pytest.mark.anyio
async def test_a_response_has_the_protocols_shape():
    async with serve() as s:
        body = (await s.client.post("/v1/responses", json=BODY)).json()
        told = (await s.client.get(f"/v1/responses/{body['id']}")).json()
    assert told == body and body.pop("id").startswith("resp_") and body.pop("created_at")
    (item,) = body.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "<USE", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    prompt = len("<user>hi</user><assistant>")
    assert body == {
        "object": "response",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "background": False,
        "max_output_tokens": 4,
        "metadata": {},
        "model": "fake",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": prompt // 16 * 16 - 3},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 4,
        },
        **dict.fromkeys(
            (
                "completed_at",
                "error",
                "instructions",
                "max_tool_calls",
                "previous_response_id",
                "prompt_cache_key",
                "safety_identifier",
                "user",
            )
        ),
    }


@pytest.mark.anyio
async def test_usage_tells_times_where_they_are_asked_for():
    async with serve() as s:
        asked = await prepare_response(s.state, ResponsesRequest(input="hi", return_timing=True))
        assert asked.chat.count.times == []
        assert (await prepare_response(s.state, ResponsesRequest(input="hi"))).chat.count.times is None


@pytest.mark.anyio
async def test_the_engine_gets_what_is_asked_for():
    fields = {"temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["x"], "logit_bias": {"5": 2}, "min_tokens": 1}
    async with serve() as s:
        await s.client.post("/v1/responses", json={**BODY, **fields, "request_id": "mine", "cache_salt": "s"})
        request_id, prompt, params = s.engine.started[-1]
        assert request_id.startswith("mine-") and prompt["cache_salt"] == "s"
        assert (params.temperature, params.top_k, params.seed, params.stop) == (0.5, 7, 3, ["x"])
        assert (params.logit_bias, params.min_tokens, params.max_tokens) == ({5: 2.0}, 1, 4)
        await s.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 100_000})
        assert s.engine.started[-1][2].max_tokens == 512 - len("<user>hi</user><assistant>")


@pytest.mark.anyio
async def test_a_refusal_is_a_status_and_nothing_is_kept():
    engine = FakeAsyncLLM()
    engine.failure = CapacityError("full")
    async with serve(engine) as s:
        for extra in ({}, {"stream": True}):
            refused = await s.client.post("/v1/responses", json=BODY | extra)
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        queued = (await s.client.post("/v1/responses", json=BACKGROUND)).json()
        failed = await until_over(s, queued["id"])
        assert failed["status"] == "failed" and failed["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.anyio
async def test_a_failure_in_a_stream_is_its_last_event_and_is_kept():
    engine = FakeAsyncLLM()
    engine.failure, engine.fail_after = EngineError("broken"), 2
    async with serve(engine) as s:
        text = (await s.client.post("/v1/responses", json=BODY | {"stream": True})).text
        *others, last = events_of(text)
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
        assert "broken" not in text and "[DONE]" not in text
        deltas = "".join(event["delta"] for event in others if event["type"].endswith(".delta"))
        (item,) = last["response"]["output"]
        assert item["content"][0]["text"] == deltas == "<U" and item["status"] == "incomplete"
        assert last["response"]["usage"]["output_tokens"] == 2
        kept = (await s.client.get(f"/v1/responses/{last['response']['id']}")).json()
        assert kept == last["response"]
        whole = await s.client.post("/v1/responses", json=BODY | {"top_logprobs": 1})
        assert whole.status_code == 500 and "broken" not in whole.text


@pytest.mark.anyio
async def test_a_client_that_goes_away_ends_its_stream_but_not_its_background():
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(2)
    async with serve(engine) as s:
        job = await prepare_response(s.state, ResponsesRequest(input="hi", stream=True))
        stream = await job.open()
        await stream.next()
        engine.news.clear()
        stream.close()
        await engine.news.wait()
        assert engine.aborted == [engine.started[0][0]]
        engine.gate = asyncio.Semaphore(1)
        request = ResponsesRequest(input="hi", max_output_tokens=4, stream=True, background=True)
        run = BackgroundRun(await prepare_response(s.state, request))
        await run.start()
        follower = run.follow()
        await anext(follower)
        await follower.aclose()
        for _ in range(4):
            engine.gate.release()
        assert (await until_over(s, run.job.response.id))["status"] == "incomplete"
        assert len(engine.aborted) == 1


@pytest.mark.anyio
async def test_every_follower_gets_every_event():
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    async with serve(engine) as s:
        request = ResponsesRequest(input="hi", max_output_tokens=30, stream=True, background=True)
        run = BackgroundRun(await prepare_response(s.state, request))
        await run.start()

        async def follow(after):
            return b"".join([events async for events in run.follow(after)])

        followers = [asyncio.ensure_future(follow(after)) for after in (-1, 4, -1)]
        for _ in range(30):
            engine.gate.release()
            await asyncio.sleep(0)
        first, later, same = await asyncio.gather(*followers)
        assert first == same and first.split(b"\n\n", 5)[-1] == later
        assert [event["sequence_number"] for event in events_of(first.decode())] == list(range(39))
        path = f"/v1/responses/{run.job.response.id}?stream=true"
        assert (await s.client.get(path)).content == first
        assert (await s.client.get(f"{path}&starting_after=4")).content == later


@pytest.mark.anyio
async def test_a_draining_server_waits_for_the_background():
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    async with serve(engine) as s:
        queued = (await s.client.post("/v1/responses", json=BACKGROUND)).json()
        s.state.draining = True
        assert s.state.in_flight == 1 and not s.state.idle.is_set()
        path = f"/v1/responses/{queued['id']}"
        assert (await s.client.get(path)).json()["status"] == "queued"
        assert (await s.client.post("/v1/responses", json=BODY)).status_code == 503
        for _ in range(4):
            engine.gate.release()
        await s.state.idle.wait()
        assert (await s.client.get(path)).json()["status"] == "incomplete" and s.state.background == {}


@pytest.mark.anyio
async def test_what_is_cancelled_keeps_what_it_had():
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(2)
    async with serve(engine) as s:
        text_of = BACKGROUND | {"stream": True, "top_logprobs": 1}
        run = BackgroundRun(await prepare_response(s.state, ResponsesRequest(**text_of)))
        await run.start()
        while engine.yielded < 2:
            await asyncio.sleep(0)
        refused = await s.client.post("/v1/responses", json=BODY | {"previous_response_id": run.job.response.id})
        assert refused.status_code == 400 and "not complete" in refused.text
        path = f"/v1/responses/{run.job.response.id}"
        answers = await asyncio.gather(*(s.client.post(f"{path}/cancel") for _ in range(3)))
        cancelled = answers[0].json()
        assert all(answer.json() == cancelled for answer in answers) and cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"] == "<U" and cancelled["usage"]["output_tokens"] == 2
        assert (await s.client.get(path)).json() == cancelled
        assert events_of((await s.client.get(f"{path}?stream=1")).text)[-1]["type"] == "response.cancelled"
        assert s.state.in_flight == 0 and s.state.background == {} and len(engine.aborted) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"background": True, "store": False}, 400, "background"),
        ({"previous_response_id": "resp_none"}, 400, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, 400, "input[0].id"),
        ({"input": "x" * 600}, 400, "input"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"metadata": {"a": 5}}, 400, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"model": "another"}, 404, "model"),
        ({"mm_processor_kwargs": {"a": 1}}, 400, "mm_processor_kwargs"),
        ({"temperature": -1}, 400, "temperature"),
        ({"tool_choice": "all"}, 400, "tool_choice"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "all"}}, 400, "tool_choice.mode"),
    ],
)
async def test_wrong_requests_are_refused_by_the_field(fields, status, param):
    async with serve() as s:
        for extra in ({}, {"stream": True}):
            response = await s.client.post("/v1/responses", json=BODY | extra | fields)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
        assert (await s.client.post("/v1/responses", json=BODY)).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?stream=null", "stream"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?starting_after=x", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
    ],
)
async def test_wrong_questions_about_a_response_are_refused(query, param):
    async with serve() as s:
        made = (await s.client.post("/v1/responses", json=BODY)).json()
        response = await s.client.get(f"/v1/responses/{made['id']}{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.anyio
async def test_kept_responses_need_a_key_and_no_engine(tmp_path):
    kept = ServerSettings(responses_store=str(tmp_path / "kept"), strict=True)
    async with serve(settings=kept) as s:
        made = (await s.client.post("/v1/responses", json=BODY)).json()
        assert (await s.client.post("/v1/responses", json=BODY | {"unknown": 1})).status_code == 400
        s.state.responses.close()
    path = f"/v1/responses/{made['id']}"
    async with serve(settings=kept, ready=False, api_keys=["secret"]) as s:
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ):
            assert (await s.client.request(method, where)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await s.client.get(path, headers=headers)).json() == made
        assert (await s.client.post("/v1/responses", json=BODY, headers=headers)).status_code == 503
        s.state.responses.close()


GOOD_ITEMS = [
    {"role": "user", "content": "x"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "y"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w"}]},
]


@st.composite
def odd_items(draw):
    """Items that would be understood, with a few of their fields replaced by anything."""
    items = []
    for item in draw(st.lists(st.sampled_from(GOOD_ITEMS), max_size=4)):
        changes = st.dictionaries(st.sampled_from([*item, "type", "id", "status"]), JSON, max_size=2)
        items.append({**item, **draw(changes)})
    return items


@st.composite
def odd_bodies(draw, kind):
    fields = st.sampled_from([*kind.__struct_encode_fields__, "unknown"])
    body = {**BODY, **draw(st.dictionaries(fields, JSON, max_size=3))}
    if draw(st.booleans()):
        body["input"] = draw(odd_items())
    if draw(st.booleans()):
        tool = {"type": "function", "name": "f", "parameters": {}}
        body["tools"] = [{**tool, **draw(st.dictionaries(st.sampled_from([*tool, "strict"]), JSON, max_size=1))}]
    return body


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/responses", ResponsesRequest), ("/v1/responses/input_tokens", InputTokensRequest)]
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_in_any_field_is_served_or_refused(path, kind, data):
    body = data.draw(odd_bodies(kind))

    async def ask():
        async with serve() as s:
            response = await s.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            next_status = (await s.client.post("/v1/responses", json=BODY)).status_code
            await asyncio.gather(*(run.cancel() for run in list(s.state.background.values())))
            s.state.responses.close()
            return response.status_code, response.text, next_status

    status, text, next_status = asyncio.run(ask())
    assert status in (200, 400, 404), text
    assert next_status == 200
    if status != 200:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
