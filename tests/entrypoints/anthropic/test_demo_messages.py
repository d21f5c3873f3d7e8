"""Anthropic's own client against `quire serve` on the demo model: what it gets streamed is what it gets whole."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from tests.oracles.demo_server import DemoServer

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
CALL = [{"role": "user", "content": "Use the calculator: 12 * 7"}]
TOOLS = [
    {
        "name": "calculate",
        "description": "Works out an expression.",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
]
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoServer]:
    server = DemoServer("--api-key", "secret", "--enable-prompt-tokens-details")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(demo):
    return anthropic.Anthropic(base_url=demo.url, api_key="secret", max_retries=0)


def fields(message: Any) -> dict[str, Any]:
    """A message without what differs from one request to the next."""
    body = message.to_dict()
    content = [{key: value for key, value in block.items() if key != "id"} for block in body["content"]]
    usage = body["usage"]
    prompt = sum(
        usage[name] or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    return {
        "content": content,
        "prompt": prompt,
        "output": usage["output_tokens"],
        **{name: body[name] for name in ("model", "role", "stop_reason", "stop_sequence", "type")},
    }


def ask(client, messages, **options) -> Any:
    """The whole answer, which must be what the stream of the same request adds up to."""
    options = {"model": "quire-demo", "max_tokens": 200, "extra_body": {"temperature": 0}, **options}
    whole = client.messages.create(messages=messages, **options)
    with client.messages.stream(messages=messages, **options) as stream:
        streamed = stream.get_final_message()
    assert fields(streamed) == fields(whole)
    return whole


def test_a_question_is_answered_whole_and_streamed(client):
    answer = ask(client, QUESTION, system="Be brief.")
    assert [block.type for block in answer.content] == ["text"] and "42" in answer.content[0].text
    assert answer.stop_reason == "end_turn" and answer.model == "quire-demo" and answer.id.startswith("msg_")


def test_the_model_calls_a_tool_and_reads_its_result(client):
    call = ask(client, CALL, tools=TOOLS)
    (block,) = [block for block in call.content if block.type == "tool_use"]
    assert call.stop_reason == "tool_use"
    assert (block.name, block.input) == ("calculate", {"expression": "12 * 7"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "84"}]}
    history = [*CALL, {"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    answer = ask(client, history, tools=TOOLS)
    assert answer.stop_reason == "end_turn" and "84" in answer.content[-1].text


def test_a_runner_of_tools_gives_the_model_all_that_was_said_before(client):
    """Newer clients continue threads by sending only what is new, which must not be answered alone."""

    @anthropic.beta_tool
    def calculate(expression: str) -> str:
        """Works out an expression.

        Args:
            expression: What to work out.
        """
        return "84"

    options = {"model": "quire-demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
    runner = client.beta.messages.tool_runner(messages=CALL, tools=[calculate], **options)
    call, answer = [fields(message) for message in runner]
    (block,) = call["content"]
    result = {"type": "tool_result", "tool_use_id": "x", "content": "84"}
    history = [*CALL, {"role": "assistant", "content": [block | {"id": "x"}]}, {"role": "user", "content": [result]}]
    assert answer == fields(ask(client, history, tools=[calculate.to_dict()]))


def test_what_the_model_thinks_is_a_block_of_its_own(client):
    answer = ask(client, QUESTION, **THINKS)
    thinking, text = answer.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert thinking.thinking and thinking.signature and "42" in text.text
    details = answer.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < answer.usage.output_tokens
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And 2 + 2?"}]
    assert "4" in ask(client, history, **THINKS).content[-1].text
    assert [block.type for block in ask(client, QUESTION, thinking={"type": "disabled"}).content] == ["text"]


def test_several_turns_and_blocks_of_text(client):
    blocks = [
        {"type": "text", "text": "What is", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "8 * 7?"},
    ]
    history = [*QUESTION, {"role": "assistant", "content": "17 + 25 = 42"}, {"role": "user", "content": blocks}]
    assert ask(client, history).content[0].type == "text"


def test_an_answer_ends_for_the_reason_that_is_told(client):
    whole = ask(client, QUESTION).content[0].text
    stop = whole[4:6]
    stopped = ask(client, QUESTION, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == whole[: whole.index(stop)]
    cut = ask(client, QUESTION, max_tokens=3)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    assert whole.startswith(cut.content[0].text)
    unknown = {"temperature": 0, "unknown_field": 1}
    assert ask(client, QUESTION, max_tokens=16_000, extra_body=unknown).content[0].text == whole


def test_an_answer_goes_on_from_the_assistants_last_words(client):
    whole = ask(client, QUESTION).content[0].text
    begun = whole[: len(whole) // 2].rstrip()
    rest = ask(client, [*QUESTION, {"role": "assistant", "content": begun}])
    assert begun + rest.content[0].text == whole


def test_events_come_in_anthropics_order(client, demo):
    options = {"model": "quire-demo", "max_tokens": 200, "stream": True, **THINKS}
    body = {**options, "temperature": 0, "messages": QUESTION}
    response = demo.client.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in response.text
    kinds = [
        event.type for event in client.messages.create(messages=QUESTION, extra_body={"temperature": 0}, **options)
    ]
    depth = 0
    for kind in kinds:
        depth += {"content_block_start": 1, "content_block_stop": -1}.get(kind, 0)
        assert depth in (0, 1) and (depth == 1 or kind != "content_block_delta")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_tokens_are_counted_as_a_message_counts_them(client):
    for extra in ({}, {"system": "Be brief."}, {"tools": TOOLS}, THINKS):
        count = client.messages.count_tokens(model="quire-demo", messages=CALL, **extra)
        assert count.input_tokens == fields(ask(client, CALL, **extra))["prompt"]


def test_the_clients_errors_have_their_classes(client, demo):
    def create(**options):
        client.messages.create(**{"model": "quire-demo", "max_tokens": 4, "messages": QUESTION, **options})

    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        create(model="claude")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        create(
            messages=[
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.test/b"}}]}
            ]
        )
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        create(messages=[{"role": "user", "content": "a b c " * 2000}], stream=True)
    stranger = anthropic.Anthropic(base_url=demo.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(model="quire-demo", max_tokens=4, messages=QUESTION)
    body = refused.value.body
    assert isinstance(body, dict) and body["type"] == "error" and body["error"]["type"] == "authentication_error"
