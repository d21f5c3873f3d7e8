"""The `openai` package's responses against `quire serve` on the demo model: what is streamed adds up to the whole."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from tests.oracles.demo_server import DemoServer

from quire.entrypoints.responses.store import ResponseStore

QUESTION = "What is 17 + 25?"
CALL = "Use the calculator: 12 * 7"
TOOLS = [
    {
        "type": "function",
        "name": "calculate",
        "description": "Evaluate an arithmetic expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        "strict": False,
    }
]
THINKS = {"reasoning": {"effort": "medium"}}
LONG = {"input": "Hello", "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Iterator[DemoServer]:
    path = tmp_path_factory.mktemp("store") / "responses.sqlite"
    server = DemoServer("--responses-store", str(path), "--disable-uvicorn-access-log")  # nobody reads what it prints
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(demo):
    return demo.openai()


def comparable(response: Any) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    body = response.to_dict()
    for name in ("id", "created_at", "completed_at", "metrics"):
        body.pop(name, None)
    body["usage"].pop("input_tokens_details")
    for item in body["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return json.loads(json.dumps(body))


def nearly(value: Any) -> Any:
    """The same value with room for rounding: a prompt found in the prefix cache is computed in other shapes."""
    if isinstance(value, dict):
        return {name: nearly(part) for name, part in value.items()}
    if isinstance(value, list):
        return [nearly(part) for part in value]
    return pytest.approx(value, abs=1e-2) if isinstance(value, float) else value


def check_stream(events: list[Any]) -> Any:
    """A stream's events are numbered and in order, and their deltas add up to what the end tells; gives the response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final.type == f"response.{final.response.status}"
    ids: list[str] = []
    texts: dict[str, str] = {}
    open_item = None
    for event in events[2:-1]:
        match event.type:
            case "response.output_item.added":
                assert open_item is None and event.output_index == len(ids)
                open_item = event.item.id
                ids.append(open_item)
                texts[open_item] = ""
            case "response.output_item.done":
                assert event.item.id == open_item and event.item == final.response.output[event.output_index]
                open_item = None
            case "response.content_part.added" | "response.content_part.done":
                assert event.item_id == open_item and event.content_index == 0
            case name if name.endswith(".delta"):
                assert event.item_id == open_item and event.delta
                texts[event.item_id] += event.delta
            case name:
                assert name.endswith(".done") and event.item_id == open_item
                told = event.arguments if "arguments" in name else event.text
                assert told == texts[event.item_id]
    assert open_item is None and ids == [item.id for item in final.response.output]
    assert list(texts.values()) == [words(item) for item in final.response.output]
    return final.response


def words(item: Any) -> str:
    return item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)


def ask(client, given: Any, **options) -> Any:
    """The whole response, which must be what the stream of the same request adds up to."""
    options = {"model": "quire-demo", "input": given, "temperature": 0, "max_output_tokens": 200, **options}
    whole = client.responses.create(**options)
    streamed = check_stream(list(client.responses.create(**options, stream=True)))
    assert comparable(streamed) == nearly(comparable(whole))
    assert client.responses.retrieve(streamed.id) == streamed
    return whole


def test_a_question_is_answered_whole_and_streamed(client):
    answer = ask(client, QUESTION, instructions="Be brief.", metadata={"topic": "sums"}, user="someone")
    assert "42" in answer.output_text and [item.type for item in answer.output] == ["message"]
    assert answer.status == "completed" and answer.id.startswith("resp_") and answer.completed_at
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"topic": "sums"}, "Be brief.", 0)
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 0


def test_the_clients_own_stream_puts_the_same_response_together(client):
    options = {"model": "quire-demo", "input": CALL, "temperature": 0, "tools": [TOOLS[0] | {"strict": True}]}
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and "response.function_call_arguments.delta" in kinds
    (call,) = final.output
    assert call.name == "calculate" and "12" in call.parsed_arguments["expression"]


def test_what_the_model_read_and_wrote_is_shown_where_that_is_asked_for(client):
    extra = {"enable_response_messages": True, "temperature": 0}
    response = client.responses.create(model="quire-demo", input="What is 17 + 25?", extra_body=extra)
    [read], [wrote] = response.input_messages, response.output_messages
    assert read["type"] == wrote["type"] == "raw_message_tokens"
    assert "What is 17 + 25?" in read["message"] and len(read["tokens"]) == response.usage.input_tokens
    assert "17 + 25 = 42" in wrote["message"] and len(wrote["tokens"]) == response.usage.output_tokens
    with client.responses.stream(model="quire-demo", input="What is 17 + 25?", extra_body=extra) as stream:
        streamed = stream.get_final_response()
    assert (streamed.input_messages, streamed.output_messages) == ([read], [wrote])
    assert "input_messages" not in client.responses.create(model="quire-demo", input="Hi").model_dump()


def test_a_conversation_goes_on_from_the_previous_response(client):
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "input_text", "text": "What is 8 * 7?"}]},
    ]
    first = client.responses.create(model="quire-demo", input=QUESTION, temperature=0)
    history[1]["content"] = first.output_text
    by_id = ask(client, "What is 8 * 7?", previous_response_id=first.id)
    by_hand = ask(client, history)
    assert by_id.output_text == by_hand.output_text and by_id.previous_response_id == first.id
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens > first.usage.input_tokens
    items = [{"role": "user", "content": QUESTION}, *first.output, history[2]]
    assert ask(client, items).usage.input_tokens == by_hand.usage.input_tokens
    reference = [items[0], {"type": "item_reference", "id": first.output[0].id}, history[2]]
    assert ask(client, reference).output_text == by_hand.output_text


def test_a_tool_is_called_and_its_result_is_used(client):
    call = ask(client, CALL, tools=TOOLS)
    (item,) = [item for item in call.output if item.type == "function_call"]
    assert item.name == "calculate" and "12" in json.loads(item.arguments)["expression"]
    assert item.call_id != item.id and call.tools[0].name == "calculate"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "84"}
    assert "84" in ask(client, [result], tools=TOOLS, previous_response_id=call.id).output_text
    history = [{"role": "user", "content": CALL}, *call.output, result]
    assert "84" in ask(client, history, tools=TOOLS).output_text
    assert [item.type for item in ask(client, CALL, tools=TOOLS, tool_choice="none").output] == ["message"]


def test_a_call_that_has_to_be_made_is_made(client):
    other = {**TOOLS[0], "name": "other"}
    named = {"type": "function", "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    for choice, name in (("required", "calculate"), (named, "other"), (allowed, "other")):
        answer = ask(client, CALL, tools=[*TOOLS, other], tool_choice=choice, extra_body={"return_timing": True})
        assert [(item.type, item.name) for item in answer.output] == [("function_call", name)]
        assert isinstance(json.loads(answer.output[0].arguments), dict) and answer.status == "completed"
        assert answer.metrics["generation_time_ms"] > 0


def test_what_the_model_thinks_is_an_item_of_its_own(client):
    answer = ask(client, QUESTION, **THINKS)
    thought, message = answer.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text.strip() and thought.summary == [] and "42" in answer.output_text
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    ask(client, "And 2 + 2?", previous_response_id=answer.id, **THINKS)
    hidden = ask(client, QUESTION, **THINKS, extra_body={"include_reasoning": False})
    assert [item.type for item in hidden.output] == ["message"] and hidden.output_text == answer.output_text
    assert [item.type for item in ask(client, QUESTION, reasoning={"effort": "none"}).output] == ["message"]


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_an_answer_has_the_form_that_is_asked_for(client):
    options = {"model": "quire-demo", "input": "Give me a person as JSON.", "temperature": 0}
    parsed = client.responses.parse(**options, text_format=Person)
    assert isinstance(parsed.output_parsed, Person) and parsed.text.format.type == "json_schema"
    schema = parsed.text.format.to_dict()
    whole = ask(client, options["input"], text={"format": schema})
    assert Person.model_validate_json(whole.output_text) == parsed.output_parsed
    thinking = ask(client, options["input"], text={"format": schema}, max_output_tokens=400, **THINKS)
    assert thinking.status == "incomplete" or Person.model_validate_json(thinking.output_text)
    json.loads(ask(client, options["input"], text={"format": {"type": "json_object"}}).output_text)


def test_logprobs_are_those_of_the_text(client):
    include = ["message.output_text.logprobs"]
    for extra in ({}, THINKS):
        message = ask(client, QUESTION, include=include, top_logprobs=2, **extra).output[-1]
        (part,) = message.content
        assert "".join(entry.token for entry in part.logprobs).strip() == part.text.strip()
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
    assert ask(client, QUESTION).output[0].content[0].logprobs == []
    assert ask(client, QUESTION, include=include).output[0].content[0].logprobs[0].top_logprobs == []


def test_logprobs_are_the_same_however_many_tokens_are_told_together(client):
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    late = DemoServer("--stream-interval", "1000", "--disable-uvicorn-access-log")
    try:
        for given, options in ((QUESTION, {}), (QUESTION, THINKS), (CALL, {"tools": TOOLS}), ("Count to 12.", {})):
            soon, at_once = (ask(one, given, **asked, **options) for one in (client, late.openai()))
            assert comparable(at_once) == nearly(comparable(soon))
    finally:
        late.kill()


def test_an_answer_that_is_cut_off_is_incomplete(client):
    cut = ask(client, QUESTION, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 3 and cut.output[0].status == "incomplete" and cut.completed_at is None
    whole = ask(client, QUESTION, max_output_tokens=1_000_000)
    assert whole.status == "completed" and whole.output_text.startswith(cut.output_text)
    begun = [{"role": "user", "content": QUESTION}, {**cut.output[0].to_dict(), "id": "msg_1"}]
    assert cut.output_text + ask(client, begun).output_text == whole.output_text


def test_old_turns_are_dropped_where_that_is_asked_for(client):
    turns: list[dict[str, str]] = []
    for number in range(120):
        turns += [{"role": "user", "content": f"Count to {number}."}, {"role": "assistant", "content": "1 2 3 4 5"}]
    long = [*turns, {"role": "user", "content": QUESTION}]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.responses.create(model="quire-demo", input=long)
    assert refused.value.param == "input" and refused.value.code == "context_length_exceeded"
    answer = ask(client, long, truncation="auto", instructions="Be brief.", max_output_tokens=64)
    assert 512 < answer.usage.input_tokens <= 1024 - 64 and answer.truncation == "auto"
    assert ask(client, QUESTION, truncation="auto").output_text == ask(client, QUESTION).output_text


def test_a_response_is_kept_listed_and_forgotten(client):
    given = [{"role": "user", "content": f"Number {number}"} for number in range(3)]
    answer = client.responses.create(model="quire-demo", input=given, max_output_tokens=4)
    assert client.responses.retrieve(answer.id) == answer
    listed = list(client.responses.input_items.list(answer.id, order="asc", limit=1))
    assert [item.content[0].text for item in listed] == ["Number 0", "Number 1", "Number 2"]
    assert [item.id for item in client.responses.input_items.list(answer.id)] == [item.id for item in listed][::-1]
    client.responses.delete(answer.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=answer.id):
            again(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="quire-demo", input="hi", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"
    unkept = client.responses.create(model="quire-demo", input="hi", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_background_response_is_waited_for(client):
    waiting = client.responses.create(model="quire-demo", input=QUESTION, temperature=0, background=True)
    assert waiting.status == "queued" and waiting.output == [] and waiting.background
    while (now := client.responses.retrieve(waiting.id)).status in ("queued", "in_progress"):
        pass
    assert now.status == "completed" and "42" in now.output_text
    assert client.responses.cancel(waiting.id) == now
    with pytest.raises(openai.BadRequestError, match="streamed again"):
        client.responses.retrieve(waiting.id, stream=True)


def test_a_background_stream_can_be_taken_up_again(client):
    options = {"model": "quire-demo", "input": QUESTION, "temperature": 0, "background": True, "stream": True}
    events = []
    with client.responses.create(**options) as stream:  # is left after some events
        for event in stream:
            events.append(event)
            if len(events) == 5:
                break
    response_id = events[0].response.id
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    events += client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and "42" in events[-1].response.output_text
    assert list(client.responses.retrieve(response_id, stream=True)) == events
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=len(events) - 1)) == []
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == client.responses.retrieve(response_id).output_text


def test_a_background_response_can_be_cancelled(client, demo):
    before = demo.metric("request_success_total", finished_reason="abort")
    stream = client.responses.create(model="quire-demo", background=True, stream=True, **LONG)
    response_id = next(iter(stream)).response.id
    cancelled = client.responses.cancel(response_id)
    assert cancelled.status == "cancelled" and client.responses.retrieve(response_id) == cancelled
    assert client.responses.cancel(response_id) == cancelled
    *_, last = stream
    assert last.type == "response.cancelled"
    while demo.metric("request_success_total", finished_reason="abort") == before:
        pass
    plain = client.responses.create(model="quire-demo", input="hi", max_output_tokens=4)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)
    running = client.responses.create(model="quire-demo", background=True, **LONG)
    client.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)


def test_the_asynchronous_client_gets_the_same(demo, client):
    whole = client.responses.create(model="quire-demo", input=QUESTION, temperature=0)

    async def ask_often() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as asynchronous:

            async def ask_once(number: int) -> str:
                options = {"model": "quire-demo", "input": QUESTION, "temperature": 0}
                if number % 2:
                    return (await asynchronous.responses.create(**options)).output_text
                events = [event async for event in await asynchronous.responses.create(**options, stream=True)]
                return check_stream(events).output_text

            return await asyncio.gather(*(ask_once(number) for number in range(12)))

    assert asyncio.run(ask_often()) == [whole.output_text] * 12


def test_input_tokens_are_counted(client):
    for extra in ({}, {"tools": TOOLS}, {"instructions": "Be brief."}, THINKS):
        count = client.responses.input_tokens.count(model="quire-demo", input=CALL, **extra)
        assert count.input_tokens == ask(client, CALL, **extra).usage.input_tokens


def test_the_clients_errors_have_their_classes(client):
    def create(**options):
        client.responses.create(**{"model": "quire-demo", "input": "hi", "max_output_tokens": 4, **options})

    with pytest.raises(openai.NotFoundError, match="not served here"):
        create(model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="web_search") as refused:
        create(tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0].type" and refused.value.code == "not_supported"
    with pytest.raises(openai.BadRequestError) as refused:
        create(temperature=-1)
    assert refused.value.param == "temperature"


def test_a_file_keeps_responses_over_a_restart(tmp_path):
    path = tmp_path / "kept.sqlite"
    flags = ("--responses-store", str(path))
    server = DemoServer(*flags)
    client = server.openai()
    first = client.responses.create(model="quire-demo", input=QUESTION, temperature=0)
    lost = client.responses.create(model="quire-demo", background=True, **LONG)
    server.kill()
    assert path.stat().st_mode & 0o077 == 0
    server = DemoServer(*flags)
    client = server.openai()
    assert client.responses.retrieve(first.id) == first
    again = client.responses.create(model="quire-demo", input="Why?", previous_response_id=first.id, temperature=0)
    assert again.usage.input_tokens > first.usage.input_tokens
    failed = client.responses.retrieve(lost.id)
    assert failed.status == "failed" and failed.error.code == "server_error"
    drained = client.responses.create(model="quire-demo", background=True, **LONG)
    code, output = server.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in output and "Exception" not in output
    store = ResponseStore(str(path))
    body = json.loads(asyncio.run(store.get(drained.id)).body)
    store.close()
    assert body["status"] == "incomplete" and body["usage"]["output_tokens"] == 900
