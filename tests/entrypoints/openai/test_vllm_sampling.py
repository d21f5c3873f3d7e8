"""vLLM's sampling fields beyond OpenAI's, over `quire serve` on the demo model: whole, streamed, several at once."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.entrypoints.openai.test_demo_server import QUESTION
from tests.oracles.demo_server import DemoServer

THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}


LATE = pytest.param("--no-async-scheduling", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=["--async-scheduling", LATE])
def demo(request: pytest.FixtureRequest) -> Iterator[DemoServer]:
    server = DemoServer(request.param)
    yield server
    server.kill()


def chat(demo: DemoServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, **THINKS, **fields}
    answer = demo.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(demo: DemoServer, **fields: Any) -> list[dict[str, Any]]:
    """Each choice's parts put together."""
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, **THINKS, "stream": True, **fields}
    choices: dict[int, dict[str, Any]] = {}
    with demo.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    kept = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "token_ids": []})
                    for name in ("content", "reasoning"):
                        kept[name] += choice["delta"].get(name) or ""
                    kept["token_ids"] += choice.get("token_ids") or []
                    kept["logprobs"] = kept.get("logprobs", []) + ((choice["logprobs"] or {}).get("content") or [])
                    kept["finish_reason"] = choice["finish_reason"]
                    kept["stop_reason"] = choice.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def token(demo: DemoServer, text: str) -> int:
    (token_id,) = demo.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return token_id


def thoughts(demo: DemoServer, token_ids: list[int]) -> int:
    """Tokens between the markers."""
    start, end = token(demo, "<think>"), token(demo, "</think>")
    return token_ids.index(end) - (token_ids[0] == start)


def test_the_reasoning_ends_by_its_budget_whole_and_streamed(demo: DemoServer) -> None:
    free = chat(demo)["choices"][0]
    natural = thoughts(demo, free["token_ids"])
    assert natural > 4
    for budget in (0, 1, 4, natural, natural + 50):
        whole = chat(demo, thinking_token_budget=budget)["choices"][0]
        assert thoughts(demo, whole["token_ids"]) == min(budget, natural)
        assert whole["message"]["content"]
        assert whole["token_ids"][: min(budget, natural)] == free["token_ids"][: min(budget, natural)]
        (streamed,) = stream(demo, thinking_token_budget=budget)
        assert streamed["token_ids"] == whole["token_ids"] and streamed["content"] == whole["message"]["content"]
        assert streamed["reasoning"] == (whole["message"]["reasoning"] or "")
    assert chat(demo, thinking_token_budget=-1)["choices"] == [free]


def test_every_one_of_n_answers_has_the_budget(demo: DemoServer) -> None:
    fields = {
        "n": 5,
        "temperature": 1.0,
        "seed": 4,
        "thinking_token_budget": 3,
        "frequency_penalty": 0.3,
        "logprobs": True,
    }
    answers = chat(demo, **fields)["choices"]
    start = token(demo, "<think>")
    thinking = [answer["token_ids"] for answer in answers if answer["token_ids"][0] == start]
    assert thinking and all(thoughts(demo, token_ids) <= 3 for token_ids in thinking)
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 1
    assert all(len(answer["logprobs"]["content"]) == len(answer["token_ids"]) for answer in answers)
    assert [each["token_ids"] for each in stream(demo, **fields)] == [answer["token_ids"] for answer in answers]


def test_a_form_holds_behind_thoughts_that_were_cut(demo: DemoServer) -> None:
    choice = {"choice": ["forty-two", "none"]}
    answer = chat(demo, thinking_token_budget=2, structured_outputs=choice)["choices"][0]
    assert thoughts(demo, answer["token_ids"]) == 2
    assert answer["message"]["content"] in choice["choice"]


def test_a_completion_s_prompt_tells_whether_it_thinks(demo: DemoServer) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
    end = token(demo, "</think>")
    inside = demo.complete(prompt="<think>\nLet me", thinking_token_budget=3, **fields)["choices"][0]
    assert inside["token_ids"].index(end) <= 3
    outside = demo.complete(prompt="Hello</think>", thinking_token_budget=3, **fields)["choices"][0]
    assert outside == demo.complete(prompt="Hello</think>", **fields)["choices"][0]


def test_an_answer_that_does_not_think_needs_no_budget(demo: DemoServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with_budget = chat(demo, thinking_token_budget=1, **off)["choices"][0]
    assert with_budget["message"]["reasoning"] is None
    assert with_budget["token_ids"] == chat(demo, **off)["choices"][0]["token_ids"]


def test_anthropic_s_budget_is_kept(demo: DemoServer) -> None:
    body = {"model": "quire-demo", "max_tokens": 200, "messages": QUESTION, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 2}
    answer = demo.client.post("/v1/messages", json={**body, "thinking": thinking}).json()
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text"] and answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 4
    wrong = demo.client.post("/v1/messages", json={**body, "thinking": {**thinking, "budget_tokens": "much"}})
    assert wrong.status_code == 400 and "thinking.budget_tokens" in wrong.text


def test_other_protocols_take_the_fields_too(demo: DemoServer) -> None:
    body = {"model": "quire-demo", "temperature": 0, "vllm_xargs": {"a": 1}}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "max_output_tokens": 200}
    asked = {**body, **thinks, "input": "What is 17 + 25?", "stream_interval": 4}
    full = demo.client.post("/v1/responses", json=asked).json()["usage"]["output_tokens_details"]["reasoning_tokens"]
    cut = demo.client.post("/v1/responses", json={**asked, "thinking_token_budget": 2})
    assert cut.status_code == 200 and cut.json()["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 < full
    watch = {"max_pattern_size": 2, "min_count": 7}
    again = {"logit_bias": {str(token(demo, "a")): 100}, "repetition_detection": watch}
    answer = demo.client.post("/v1/responses", json={**body, "input": "x", **again}).json()
    assert answer["usage"]["output_tokens"] == 7 and answer["status"] == "completed"
    message = demo.client.post("/v1/messages", json={**body, "messages": QUESTION, "max_tokens": 20})
    assert message.status_code == 200


def test_an_answer_that_goes_round_in_circles_ends(demo: DemoServer) -> None:
    again = token(demo, "a")
    fields = {"logit_bias": {str(again): 100}, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 50}
    watch = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 7}
    whole = chat(demo, repetition_detection=watch, **fields)["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("repetition", "repetition_detected")
    assert whole["token_ids"] == [again] * 7
    (streamed,) = stream(demo, repetition_detection=watch, **fields)
    assert streamed["token_ids"] == whole["token_ids"] and streamed["finish_reason"] == "repetition"
    assert demo.metric("request_success_total", finished_reason="repetition") >= 2
    late = demo.complete(prompt="a", logit_bias={again: 100}, repetition_detection=watch, min_tokens=9, max_tokens=50)
    assert late["usage"]["completion_tokens"] == 9
    assert chat(demo, **fields)["choices"][0]["finish_reason"] == "length"


def test_the_logprobs_of_named_tokens_are_told(demo: DemoServer) -> None:
    yes, no = token(demo, "Y"), token(demo, "N")
    every = demo.complete(prompt="Is it?", max_tokens=3, logprobs=20, return_tokens_as_token_ids=True)["choices"][0]
    fields = {"prompt": "Is it?", "max_tokens": 3, "return_tokens_as_token_ids": True}
    named = demo.complete(logprob_token_ids=[yes, no, yes], **fields)["choices"][0]
    assert named["text"] == every["text"] and named["logprobs"]["tokens"] == every["logprobs"]["tokens"]
    assert named["logprobs"]["token_logprobs"] == pytest.approx(every["logprobs"]["token_logprobs"], abs=1e-4)
    sampled_tokens, tops = named["logprobs"]["tokens"], named["logprobs"]["top_logprobs"]
    for sampled, position, likely in zip(sampled_tokens, tops, every["logprobs"]["top_logprobs"], strict=True):
        assert list(position) == list(dict.fromkeys([sampled, f"token_id:{yes}", f"token_id:{no}"]))
        for name, logprob in position.items():
            assert (
                logprob == pytest.approx(likely[name], abs=1e-4) if name in likely else logprob < min(likely.values())
            )
    answer = chat(demo, logprob_token_ids=[no, yes], max_tokens=4)["choices"][0]
    tops = [[entry["token"] for entry in each["top_logprobs"]] for each in answer["logprobs"]["content"]]
    assert tops == [list(dict.fromkeys([each["token"], "N", "Y"])) for each in answer["logprobs"]["content"]]
    assert len(tops) == 4
    (streamed,) = stream(demo, logprob_token_ids=[no, yes], max_tokens=4)
    assert streamed["logprobs"] == answer["logprobs"]["content"]


def test_a_stream_tells_several_tokens_at_a_time(demo: DemoServer) -> None:
    body = {"messages": QUESTION, "temperature": 0, "stream": True, "max_tokens": 30, "ignore_eos": True}

    def texts(**fields: Any) -> list[str]:
        lines = demo.client.post("/v1/chat/completions", json={**body, **fields}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        return [delta["content"] for delta in deltas if delta.get("content")]

    assert "".join(texts(stream_interval=10)) == "".join(texts())
    assert 2 <= len(texts(stream_interval=10)) <= 4
    assert len(texts(stream_interval=100)) == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "min_count"),
        ({"repetition_detection": {"size": 4}}, "repetition_detection"),
        ({"logprob_token_ids": [10**9]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(demo: DemoServer, fields: dict[str, Any], field: str) -> None:
    answer = demo.client.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_model_without_reasoning_has_none_to_limit() -> None:
    server = DemoServer("--reasoning-parser", "none")
    try:
        answer = server.client.post("/v1/chat/completions", json={"messages": QUESTION, "thinking_token_budget": 5})
        assert answer.status_code == 400 and "--reasoning-parser" in answer.json()["error"]["message"]
        thinking = {"type": "enabled", "budget_tokens": 2}
        body = {"model": "quire-demo", "max_tokens": 9, "messages": QUESTION, "thinking": thinking}
        assert server.client.post("/v1/messages", json=body).status_code == 200
    finally:
        server.kill()
