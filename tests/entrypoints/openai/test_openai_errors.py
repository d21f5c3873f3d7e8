"""What the routes answer when something is wrong: the protocol's error shape, the field named, nobody else harmed."""

import asyncio
import json

import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM, engine_config

from quire.config import SchedulerConfig, limits
from quire.engine.queue_view import QueueView
from quire.entrypoints.http import streaming
from quire.entrypoints.http.errors import error_of_finished
from quire.entrypoints.http.state import ServerSettings
from quire.errors import CapacityError, DeadlineError, EngineDeadError, EngineError, RequestError
from quire.request import QueueState

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
USER = {"role": "user", "content": "hi"}


def error_of(response, status: int) -> dict:
    """The error block, after checking status and shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        (b"", None, "empty"),
        (b"   ", None, "empty"),
        (b"not json", None, "valid JSON"),
        (b'{"prompt": "a"', None, "valid JSON"),
        (b'{"prompt": "a"} x', None, "valid JSON"),
        (b'{"prompt": NaN}', None, "valid JSON"),
        (b'{"prompt": "\xff\xfe"}', None, "UTF-8"),
        (b'{"prompt": "\\ud800"}', None, "valid JSON"),
        (b"[1, 2]", None, "object"),
        (b'"text"', None, "object"),
        (b"null", None, "object"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", None, "levels deep"),
        (b'{"metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", None, "levels deep"),
        (b'{"prompt": 5}', "prompt", "expected"),
        (b'{"prompt": {"a": 1}}', "prompt", "expected"),
        (b'{"prompt": [1, "a"]}', "prompt", "mixes"),
        (b'{"prompt": [1, [2]]}', "prompt", "mixes"),
        (b'{"prompt": []}', "prompt", "empty"),
        (b'{"prompt": [[]]}', "prompt", "empty"),
        (b'{"prompt": "", "add_special_tokens": false}', "prompt", "empty"),
        (b'{"prompt": [1.5]}', "prompt[0]", "expected"),
        (b'{"prompt": [-1]}', "prompt", "vocabulary"),
        (b'{"prompt": [257]}', "prompt", "vocabulary"),
        (b'{"prompt": [99999999999999999999999999999999]}', "prompt", "vocabulary"),
        (b"{}", "prompt", "required"),
        (b'{"prompt": "a", "max_tokens": "4"}', "max_tokens", "int"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "int"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens", "int"),
        (b'{"prompt": "a", "max_tokens": 1e999}', "max_tokens", "range"),
        (b'{"prompt": "a", "max_tokens": 99999999999999999999999}', "max_tokens", "512"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens", "range"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature", "float"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "range"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "token id"),
        (b'{"prompt": "a", "logit_bias": {"1": "x"}}', "logit_bias[...]", "float"),
        (b'{"prompt": "a", "stop": 5}', "stop", "expected"),
        (b'{"prompt": "a", "stream_options": {}}', "stream_options", "stream"),
        (b'{"prompt": "a", "stream": true, "stream_options": 1}', "stream_options", "object"),
        (b'{"prompt": "a", "n": 2, "best_of": 1}', "best_of", "less than n"),
        (b'{"prompt": "a", "best_of": 1000000000}', "best_of", "at most"),
        (b'{"prompt": ["a", "b"], "n": 10000}', "n", "at most"),
        (b'{"prompt": ["a"' + b', "a"' * 2000 + b"]}", "prompt", "at most"),
        (b'{"prompt": "a", "n": 0}', "n", "n"),
        (b'{"prompt": "a", "use_beam_search": true, "n": 1000}', "n", "beam"),
        (b'{"prompt": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens", "at least 1"),
        (b'{"prompt": "a", "cache_salt": ""}', "cache_salt", "length"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix", "not supported yet"),
        (b'{"prompt": "a", "guided_json": {}, "guided_regex": "a"}', "guided_json", "cannot be used together"),
        (b'{"prompt": "a", "structured_outputs": {"form": 1}}', "structured_outputs", "allowed: json"),
        (b'{"prompt": "a", "structured_outputs": {"regex": 5}}', "structured_outputs", "text of 1 to"),
        (b'{"prompt": "a", "use_beam_search": true, "guided_json": {}}', "structured_outputs", "beam search"),
        (b'{"prompt": "a", "response_format": {"type": "x"}}', "response_format.type", "unknown"),
        (b'{"prompt": "a", "response_format": {}}', "response_format.type", "required"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else None,
)
async def test_a_wrong_completion_body_is_a_400_that_names_the_field(server, body, param, word):
    async with server() as s:
        headers = {"content-type": "application/json"}
        error = error_of(await s.client.post(COMPLETE, content=body, headers=headers), 400)
        assert error["param"] == param and word in error["message"]
        assert error["type"] == "invalid_request_error"
        assert s.engine.started == []
        assert (await s.complete()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": ["a"]}, "structured_outputs"),
        (
            {"response_format": {"type": "structural_tag", "format": 5, "triggers": 1}, "guided_choice": "ab"},
            "response_format",
        ),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        (
            {"use_beam_search": True, "tool_choice": "required", "tools": [{"function": {"name": "f"}}]},
            "tool_choice",
        ),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
    ],
    ids=str,
)
async def test_a_wrong_chat_body_is_a_400_that_names_the_field(server, fields, param):
    async with server() as s:
        assert error_of(await s.chat(**fields), 400)["param"] == param
        assert s.engine.started == []


async def test_a_missing_field_is_named(server):
    async with server() as s:
        error = error_of(await s.client.post(CHAT, json={}), 400)
        assert error["param"] == "messages" and error["code"] == "missing_field"


async def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(server):
    async with server() as s:
        for stream in (False, True):
            error = error_of(await s.complete(prompt="x" * 600, stream=stream), 400)
            assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
            assert "512" in error["message"] and "601" in error["message"]
        error = error_of(await s.chat(messages=[{"role": "user", "content": "x" * 600}]), 400)
        assert error["param"] == "messages"


async def test_unsupported_fields_at_their_neutral_values_are_fine(server):
    async with server() as s:
        neutral = {"guided_json": None, "response_format": {"type": "text"}, "suffix": None}
        assert (await s.complete(**neutral)).status_code == 200
        chat = {"tool_choice": "auto", "modalities": ["text"], "functions": None, "parallel_tool_calls": True}
        assert (await s.chat(**chat)).status_code == 200


async def test_unknown_fields_are_ignored_unless_the_operator_is_strict(server):
    async with server() as s:
        assert (await s.complete(frobnicate=1)).status_code == 200
    async with server(settings=ServerSettings(strict=True)) as s:
        error = error_of(await s.complete(frobnicate=1), 400)
        assert error["param"] == "frobnicate" and error["code"] == "unknown_field"


async def test_an_unknown_model_is_a_404(server):
    async with server() as s:
        error = error_of(await s.complete(model="gpt-9"), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model" and "fake" in error["message"]
        error_of(await s.client.get("/v1/models/gpt-9"), 404)
        error_of(await s.client.post("/tokenize", json={"prompt": "a", "model": "x"}), 404)


async def test_unknown_routes_and_methods_have_the_same_shape(server):
    async with server() as s:
        assert error_of(await s.client.get("/nowhere"), 404)["code"] == "route_not_found"
        assert error_of(await s.client.get(CHAT), 405)["code"] == "method_not_allowed"
        assert error_of(await s.client.delete("/v1/models"), 405)["code"] == "method_not_allowed"


async def test_a_body_over_the_limit_is_a_413(server):
    async with server(settings=ServerSettings(max_body_bytes=1000)) as s:
        error_of(await s.complete(prompt="x" * 2000), 413)

        async def without_a_length():
            for _ in range(20):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        error_of(await s.client.post(COMPLETE, content=without_a_length(), headers=headers), 413)
        assert (await s.complete()).status_code == 200


async def test_other_content_types_are_refused(server):
    async with server() as s:
        error_of(await s.client.post(COMPLETE, content=b"prompt=a", headers={"content-type": "text/plain"}), 400)
        zipped = await s.client.post(COMPLETE, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert "Content-Encoding: 'gzip'" in error_of(zipped, 400)["message"]


async def test_keys_guard_every_route_but_health(server):
    async with server(api_keys=["one", "two"]) as s:
        for path in ("/v1/models", "/version", "/openapi.json", "/nowhere", "/load"):
            error = error_of(await s.client.get(path), 401)
            assert error["code"] == "invalid_api_key"
        for header in ("Bearer three", "Bearer ", "Basic one", "one", "Bearer onetwo"):
            error_of(await s.client.get("/v1/models", headers={"Authorization": header}), 401)
        for key in ("one", "two"):
            response = await s.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
        assert (await s.client.get("/health")).status_code == 200


async def test_probes_and_monitors_need_no_key_unless_the_operator_wants_one(server):
    async with server(api_keys=["one"]) as s:
        paths = ("/ready", "/ping", "/metrics", "/docs", "/health", "/live")
        answers = [(await s.client.get(path)).status_code for path in paths]
        assert answers == [200, 200, 503, 200, 200, 200], "there are no metrics of an engine that is not there"
    async with server(api_keys=["one"], settings=ServerSettings(api_key_for="all")) as s:
        answers = [
            (await s.client.get(path)).status_code for path in ("/ready", "/ping", "/metrics", "/health", "/live")
        ]
        assert answers == [401, 401, 401, 200, 200]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/embedding", "/v1/embeddings"),
        ("/metric", "/metrics"),
        ("/v1/completions/", "/v1/completions"),
    ],
)
async def test_a_route_that_is_not_there_names_the_one_that_may_be_meant(server, path, meant):
    async with server() as s:
        error = error_of(await s.client.post(path, json={}), 404)
        assert error["message"].endswith(f"; did you mean {meant!r}?")
        assert "did you mean" not in error_of(await s.client.post("/frobnicate", json={}), 404)["message"]


async def test_a_wrong_method_names_the_right_one(server):
    async with server() as s:
        assert error_of(await s.client.get(COMPLETE), 405)["message"].endswith("; allowed: POST.")


async def test_misspelled_fields_are_told_in_a_header_and_logged_once_each(server, caplog):
    async with server() as s:
        with caplog.at_level("WARNING", logger="quire"):
            answers = [await s.complete(temprature=0, frobnicate=1, **{"ünknown\n": 1}) for _ in range(2)]
            streamed = await s.chat(stream=True, max_token=3)
        header = answers[1].headers["quire-warnings"]
        assert (
            "'temprature' (did you mean 'temperature'?) was ignored" in header and "'frobnicate' was ignored" in header
        )
        assert header.isprintable() and header.isascii()
        assert "did you mean 'max_tokens'?" in streamed.headers["quire-warnings"]
        assert "quire-warnings" not in (await s.complete()).headers
    told = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert len(told) == 4 and any("did you mean 'temperature'" in line for line in told)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"stream": True, "stream_options": {"includ_usage": True}},
            "'stream_options.includ_usage' (did you mean 'include_usage'?)",
        ),
        ({"response_format": {"type": "text", "shcema": {}}}, "'response_format.shcema' was ignored"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}},
            "'response_format.json_schema.strickt' (did you mean 'strict'?)",
        ),
        ({"messages": [HELLO, HELLO | {"nane": "Bob"}]}, "'messages[1].nane' (did you mean 'name'?)"),
        (
            {"messages": [HELLO | {"content": [{"type": "text", "text": "hi", "cache_contrl": {}}]}]},
            "'messages[0].content[0].cache_contrl' (did you mean 'cache_control'?)",
        ),
        (
            {"tools": [WEATHER | {"function": {"name": "weather", "parameter": {}}}]},
            "'tools[0].function.parameter' (did you mean 'parameters'?)",
        ),
    ],
    ids=str,
)
async def test_unknown_fields_within_fields_are_told_by_their_path(server, fields, told):
    async with server() as s:
        answer = await s.chat(**fields)
        assert answer.status_code == 200 and told in answer.headers["quire-warnings"]
    async with server(settings=ServerSettings(strict=True)) as s:
        error = error_of(await s.chat(**fields), 400)
        assert error["code"] == "unknown_field" and told.removesuffix(" was ignored") in error["message"]


async def test_fields_that_only_a_chat_template_knows_are_no_mistake(server):
    async with server(settings=ServerSettings(strict=True)) as s:
        answer = await s.chat(messages=[HELLO | {"mood": "good"}], tools=[WEATHER | {"origin": "here"}])
        assert answer.status_code == 200 and "quire-warnings" not in answer.headers


async def test_of_many_unknown_fields_within_a_field_some_are_told(server):
    async with server() as s:
        answer = await s.chat(stream=True, stream_options={f"unknown{index}": 1 for index in range(5000)})
        assert len(answer.headers["quire-warnings"].split("; ")) == 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"rol": "user", "content": "hi"}]}, "(this object has 'rol')"),
        ({"messages": [{"role": "user", "contnet": "hi"}]}, "(this object has 'contnet')"),
        ({"response_format": {"tpye": "text"}}, "this field is required; the request has 'response_format.tpye'."),
    ],
    ids=str,
)
async def test_a_missing_field_within_a_field_names_the_one_that_was_sent_in_its_place(server, fields, message):
    async with server() as s:
        assert message in error_of(await s.chat(**fields), 400)["message"]


async def test_a_word_that_is_not_one_of_a_fields_tells_those_that_are(server):
    async with server() as s:
        error = error_of(await s.complete(truncation_side="middle"), 400)
        assert error["message"] == "truncation_side: invalid enum value 'middle'; allowed: left, right."
        assert error["param"] == "truncation_side"


async def test_a_strict_server_names_the_field_that_may_be_meant(server):
    async with server(settings=ServerSettings(strict=True)) as s:
        assert "'temprature' (did you mean 'temperature'?)" in error_of(await s.complete(temprature=0), 400)["message"]


async def test_a_missing_field_names_the_one_that_was_sent_in_its_place(server):
    async with server() as s:
        answer = await s.client.post("/v1/chat/completions", json={"message": [{"role": "user", "content": "hi"}]})
        error = error_of(answer, 400)
        assert error["message"] == "messages: this field is required; the request has 'message'."


@pytest.mark.parametrize(
    ("failure", "status", "retry"),
    [
        (RequestError("n: too large", param="n"), 400, None),
        (CapacityError("The queue is full.", retry_after=2.3), 429, "3"),
        (CapacityError("The queue is full."), 429, "1"),
        (DeadlineError("too late"), 504, None),
        (EngineDeadError("core died: secret detail"), 503, "1"),
        (EngineError("secret detail"), 500, None),
        (ZeroDivisionError("secret detail"), 500, None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_the_engines_refusals_become_statuses(server, failure, status, retry, stream, path):
    async with server() as s:
        s.engine.failure = failure
        response = await getattr(s, path)(stream=stream)
        error = error_of(response, status)
        assert "secret" not in error["message"]
        assert response.headers.get("retry-after") == retry
        if status == 500:
            assert response.headers["x-request-id"] in error["message"]
        s.engine.failure = None
        assert (await s.complete()).status_code == 200


@pytest.mark.parametrize("started", [False, True])
async def test_a_missed_deadline_is_one_line_of_the_log_and_no_error(server, started, caplog):
    async with server() as s:
        s.engine.failure, s.engine.fail_after = DeadlineError("2 s have passed"), 1 if started else 0
        assert "deadline_exceeded" in (await s.complete(stream=started)).text
    (line,) = [record for record in caplog.records if "2 s have passed" in record.getMessage()]
    assert line.levelname == "WARNING" and line.exc_info is None


async def test_a_full_queue_refuses_a_request_before_its_body_is_read(server):
    engine = FakeAsyncLLM()
    engine.queue.state = QueueState(max_waiting=2, delay=6.5, closed=[""])
    async with server(engine) as s:
        answer = await s.client.post("/v1/completions", content=b"{ this is no JSON")
        assert error_of(answer, 429)["code"] == "over_capacity" and answer.headers["retry-after"] == "7"
        assert (await s.client.post("/reset_prefix_cache")).status_code == 200  # which does not queue
        engine.queue.state = QueueState(max_waiting=2)
        assert (await s.complete()).status_code == 200


async def test_a_queue_that_a_burst_has_filled_since_the_last_step_refuses_too(server):
    engine = FakeAsyncLLM()
    engine.queue = QueueView(SchedulerConfig(max_num_waiting=2, max_num_seqs=3))
    async with server(engine) as s:
        engine.num_unfinished = 5  # three of them may run
        answer = await s.client.post("/v1/completions", content=b"{ this is no JSON")
        assert error_of(answer, 429)["code"] == "over_capacity"
        engine.num_unfinished = 4
        assert (await s.complete()).status_code == 200
        with s.state.preparing():  # the engine does not know of this one yet
            assert (await s.complete()).status_code == 429
        assert (await s.complete()).status_code == 200


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}])
async def test_prompt_logprobs_of_many_prompts_are_refused_by_their_sum(server, fields, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 79)
    async with server() as s:
        error = error_of(await s.complete(prompt=["abc"] * 4, **fields), 400)
        assert "80 entries (16 prompt tokens x 5); at most 79" in error["message"]
        assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in fields else "logprobs")
        assert (await s.complete(prompt=["abc"] * 3, **fields)).status_code == 200


@pytest.mark.parametrize("failure", [EngineError("secret detail"), ZeroDivisionError("secret detail")], ids=repr)
async def test_the_cause_of_a_failure_of_ours_is_in_the_log_with_the_request_id(server, failure, monkeypatch):
    told: list[str] = []

    def note(message, *args, exc_info=None):
        told.append(f"{message % args} {exc_info}")

    monkeypatch.setattr(streaming.logger, "error", note)
    async with server() as s:
        s.engine.failure = failure
        response = await s.complete(prompt=["a", "b"])
        assert len(told) == 1 and response.headers["x-request-id"] in told[0] and "secret detail" in told[0]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_a_failure_within_a_stream_is_an_error_event_and_done(server, path):
    async with server() as s:
        s.engine.failure, s.engine.fail_after = EngineDeadError("gone"), 2
        blocks = (await getattr(s, path)(stream=True)).text.strip().split("\n\n")
        assert blocks[-1] == "data: [DONE]"
        assert json.loads(blocks[-2][6:])["error"]["code"] == "engine_dead"


async def test_a_failing_prompt_among_several_fails_the_request_as_itself(server):
    async with server() as s:
        s.engine.failure = CapacityError("full", retry_after=1)
        for stream in (False, True):
            error_of(await s.complete(prompt=["a", "b", "c"], stream=stream), 429)


async def test_without_a_tokenizer_only_token_ids_are_taken(server):
    async with server(FakeAsyncLLM(engine_config(skip_tokenizer_init=True))) as s:
        assert error_of(await s.complete(), 400)["param"] == "prompt"
        assert error_of(await s.chat(), 400)["param"] == "messages"
        assert (await s.complete(prompt=[97])).status_code == 200
        error_of(await s.client.post("/detokenize", json={"tokens": [1]}), 400)


async def test_a_template_that_refuses_is_a_400(server):
    async with server(settings=ServerSettings(trust_request_chat_template=True)) as s:
        for template in ("{{ raise_exception('no') }}", "{% for %}", "{{ messages.x.y }}"):
            assert error_of(await s.chat(chat_template=template), 400)["param"] in ("messages", "chat_template")


async def test_tokenize_wants_a_prompt_or_messages(server):
    async with server() as s:
        error_of(await s.client.post("/tokenize", json={}), 400)
        error_of(await s.client.post("/tokenize", json={"prompt": "a", "messages": [USER]}), 400)
        error_of(await s.client.post("/detokenize", json={"tokens": [-1]}), 400)
        error_of(await s.client.post("/detokenize", json={"tokens": "a"}), 400)


async def test_a_bad_request_among_good_ones_harms_none_of_them(server):
    async with server() as s:
        good = [s.complete(prompt=f"p{i}") for i in range(8)]
        bad = [s.complete(prompt=5), s.complete(n="x"), s.chat(messages=[])]
        responses = await asyncio.gather(*good, *bad)
        assert [r.status_code for r in responses] == [200] * 8 + [400] * 3
        assert responses[3].json()["choices"][0]["text"] == "P3P3"


def test_the_engines_own_failure_message_is_shown_with_the_request_id():
    assert "abc" in error_of_finished(None, "abc").detail.message
    assert "bad row" in error_of_finished("bad row", "abc").detail.message


NESTED = '{"a":' * 50_000 + "1" + "}" * 50_000
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": NESTED}}
DEEP = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]
DEEP_ITEMS = [{"type": "message", "role": "user", "content": "x"}]
DEEP_ITEMS += [{"type": "function_call", "call_id": "1", "name": "f", "arguments": NESTED}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": DEEP}),
        ("/v1/chat/completions/batch", {"messages": [DEEP, DEEP]}),
        ("/v1/responses", {"input": DEEP_ITEMS}),
        ("/tokenize", {"messages": DEEP}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": NESTED}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"structural_tag": NESTED}}),
        ("/v1/chat/completions", {"messages": DEEP[:1], "tools": [{"type": "function", "function": {"name": NESTED}}]}),
    ],
)
async def test_text_within_a_field_that_is_parsed_again_may_not_be_nested_for_ever(server, path, body):
    async with server() as s:
        refused = await s.client.post(path, json=body)
        assert refused.status_code == 400, refused.text[:300]
        assert (await s.complete()).status_code == 200
