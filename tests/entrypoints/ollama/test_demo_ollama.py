"""Ollama's own client against `quire serve` on the demo model: what it gets streamed is what it gets whole."""

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from tests.oracles.demo_server import DemoServer

MODEL = "quire-demo"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = {"temperature": 0, "num_predict": 60}


def calculate(expression: str) -> str:
    """Works out an expression.

    Args:
        expression: the expression
    """
    assert expression == "12 * 7"
    return "84"


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoServer]:
    server = DemoServer("--api-key", "secret")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(demo) -> ollama.Client:
    return ollama.Client(demo.url, headers={"authorization": "Bearer secret"})


def ask(client, messages, **options) -> Any:
    """The whole message, which must be what the stream of the same request adds up to."""
    options = {"model": MODEL, "messages": messages, "options": GREEDY, **options}
    whole = client.chat(**options)
    parts = list(client.chat(**options, stream=True))
    messages = [part.message for part in parts]
    assert "".join(each.content or "" for each in messages) == (whole.message.content or "")
    assert "".join(each.thinking or "" for each in messages) == (whole.message.thinking or "")
    assert [call for each in messages for call in each.tool_calls or ()] == list(whole.message.tool_calls or ())
    assert parts[-1].done and (parts[-1].eval_count, parts[-1].prompt_eval_count) == (
        whole.eval_count,
        whole.prompt_eval_count,
    )
    assert whole.total_duration >= whole.eval_duration > 0
    return whole


def test_a_question_is_answered(client):
    answer = ask(client, QUESTION)
    assert "42" in answer.message.content and answer.done_reason == "stop" and answer.message.thinking is None


def test_the_model_calls_a_tool_and_reads_its_result(client):
    asked = [{"role": "user", "content": "Use the calculator: 12 * 7"}]
    answer = ask(client, asked, tools=[calculate])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("calculate", {"expression": "12 * 7"})
    result = {"role": "tool", "tool_name": "calculate", "content": calculate(**call.function.arguments)}
    assert "84" in ask(client, [*asked, answer.message, result], tools=[calculate]).message.content


def test_it_thinks_if_it_should(client):
    answer = ask(client, [{"role": "user", "content": "What is 3 + 4?"}], think=True)
    assert answer.message.thinking and "7" in answer.message.content


def test_an_answer_has_the_form_that_is_asked_for(client):
    schema = {"type": "string", "enum": ["forty-two", "seven"]}
    answer = client.chat(MODEL, QUESTION, format=schema, options=GREEDY)
    assert answer.message.content in ('"forty-two"', '"seven"') and answer.done_reason == "stop"


def test_prompts_are_continued_and_their_ends_known(client):
    asked = {"model": MODEL, "prompt": "one two three", "options": {"temperature": 0, "num_predict": 5}}
    for raw in (True, False):
        whole = client.generate(**asked, raw=raw)
        parts = list(client.generate(**asked, raw=raw, stream=True))
        assert "".join(part.response for part in parts) == whole.response
        assert (whole.done_reason, whole.eval_count, parts[-1].eval_count) == ("length", 5, 5)


def test_models_are_listed_and_described(client):
    assert [each.model for each in client.list().models] == [each.model for each in client.ps().models] == [MODEL]
    shown = client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template


def test_refusals_are_the_clients_errors(client, demo):
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        client.chat("other", QUESTION)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="API key"):
        ollama.Client(demo.url).chat(MODEL, QUESTION)
