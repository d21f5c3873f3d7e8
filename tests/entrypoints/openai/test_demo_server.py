"""`quire serve` on the built-in demo model, as users meet it: the `openai` package, plain HTTP, signals."""

import concurrent.futures
import json
import re
import signal
import subprocess
import sys

import httpx
import openai
import pytest
from tests.oracles.demo_server import DemoServer

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = {"prompt": "one two", "max_tokens": 900, "n": 16, "ignore_eos": True, "stream": True}
"""Some megabytes of stream: still running when a test has read its first line and acts."""
PROMPTS = ["one two three", "Count from 3 to 9.", "Sort: 5 2 9 1", "Hello", "Who are you?", "What is 8 * 7?"]


@pytest.fixture
def demo(plain_demo: DemoServer) -> DemoServer:
    return plain_demo


def test_the_start_prints_a_line_to_try_that_works(demo):
    hint = demo.line_with("curl ")
    url = re.search(r"curl (\S+)", hint)
    body = re.search(r"-d '(.*)'", hint)
    assert url and body
    answer = httpx.post(url[1], content=body[1], headers={"content-type": "application/json"}, timeout=120)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_the_openai_client_gets_the_same_answer_streamed_and_whole(demo):
    client = demo.openai()
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "42" in (whole.choices[0].message.content or "") and whole.choices[0].finish_reason == "stop"
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options=options
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_usage_tells_how_many_tokens_were_reasoning(demo):
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
    options = {"model": "quire-demo", "messages": QUESTION, "temperature": 0, "extra_body": thinks}
    whole = demo.openai().chat.completions.create(**options)
    message, token_ids = whole.choices[0].message, whole.choices[0].model_extra["token_ids"]
    start, end = (
        token_ids.index(*demo.client.post("/tokenize", json={"prompt": marker}).json()["tokens"])
        for marker in ("<think>", "</think>")
    )
    assert "42" in message.content and message.model_extra["reasoning"]
    assert whole.usage.completion_tokens_details.reasoning_tokens == end - start - 1 < whole.usage.completion_tokens
    *_, last = demo.openai().chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole.usage
    plain = demo.openai().chat.completions.create(model="quire-demo", messages=QUESTION, temperature=0)
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_every_served_name_is_a_model(demo):
    for model in demo.openai().models.list().data:
        assert demo.openai().models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        demo.openai().models.retrieve("another")


def test_the_openai_client_gets_completions_with_logprobs_and_n(demo):
    client = demo.openai()
    answer = client.completions.create(
        model="quire-demo", prompt="one two three", max_tokens=5, n=3, seed=1, logprobs=2, temperature=1.0
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) <= 5
        assert all(value is not None and value <= 0 for value in logprobs.token_logprobs or [])
        places = zip(logprobs.tokens, logprobs.text_offset or [], strict=True)
        assert all(choice.text[place:].startswith(token) for token, place in places if token in choice.text)
    again = client.completions.create(
        model="quire-demo", prompt="one two three", max_tokens=5, n=3, seed=1, temperature=1.0
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


def test_the_openai_clients_errors_have_their_classes(demo):
    client = demo.openai()
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="quire-demo", prompt="a b c " * 2000)


def test_concurrent_greedy_requests_give_what_each_gives_alone(demo):
    alone = [demo.complete(prompt=prompt)["choices"][0]["text"] for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(demo.complete, prompt=prompt) for prompt in PROMPTS * 4]
        together = [job.result()["choices"][0]["text"] for job in jobs]
    assert together == alone * 4
    batched = demo.complete(prompt=PROMPTS)
    assert [choice["text"] for choice in batched["choices"]] == alone


def test_a_request_with_a_seed_gives_the_same_tokens_every_time(demo):
    fields = {"prompt": "Hello", "temperature": 1.0, "seed": 11, "return_token_ids": True}
    first = demo.complete(**fields)["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(demo.complete, **fields) for _ in range(8)]
        assert all(job.result()["choices"][0]["token_ids"] == first for job in jobs)


def test_echo_scores_the_prompt(demo):
    choice = demo.complete(prompt="one two three", echo=True, max_tokens=0, logprobs=1)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "one two three"
    assert logprobs["token_logprobs"][0] is None and all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(
        demo.client.post("/tokenize", json={"prompt": "one two three"}).json()["tokens"]
    )


def test_beam_search_gives_distinct_answers(demo):
    body = demo.complete(prompt="one two three", use_beam_search=True, n=3, max_tokens=4)
    assert len({choice["text"] for choice in body["choices"]}) == 3


def test_stop_strings_end_an_answer(demo):
    fields = {"prompt": "Count from 3 to 9.", "max_tokens": 24, "ignore_eos": True}
    text = demo.complete(**fields)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    choice = demo.complete(**fields, stop=[stop])["choices"][0]
    assert len(text) > 4 and choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b'{"prompt": "\xff"}',
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000000}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_k": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [99999999999999999999999]}',
        b'{"messages": [{"role": "user", "content": "x"}], "priority": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": -0.5}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e300}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_p": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_p": 2}',
        b'{"messages": [{"role": "user", "content": "x"}], "min_p": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "repetition_penalty": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "presence_penalty": 99}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"-1": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "allowed_token_ids": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "allowed_token_ids": [99999999]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["' + b'", "'.join([b"x"] * 5000) + b'"]}',
        b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 1000}',
        b'{"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1000}',
        b'{"messages": [{"role": "user", "content": "x"}], "use_beam_search": true, "n": 100000}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"conversation": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 1}}',
        *(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "x"},
                        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
                    ]
                }
            ).encode()
            for function in [
                {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth} for depth in (65, 990, 50_000)
            ]
        ),
        json.dumps({"messages": [{"role": "user", "content": " " * 10_000_000}]}).encode(),
    ],
    ids=lambda body: repr(body[-60:]),
)
def test_garbage_is_a_400_and_the_engine_goes_on(demo, body):
    for extra in (b"", b'"stream": true, '):
        content = body.replace(b"{", b"{" + extra, 1) if body.startswith(b"{") else body
        response = demo.client.post("/v1/chat/completions", content=content)
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert demo.complete(prompt="Hello", max_tokens=1)["choices"]


def test_a_client_that_goes_away_has_its_request_aborted(demo):
    before = demo.metric("request_success_total", finished_reason="abort")
    with demo.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
    for _ in range(2000):
        if demo.metric("request_success_total", finished_reason="abort") > before:
            break
    else:
        raise AssertionError("the request was not aborted")


def test_metrics_count_what_was_done(demo):
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    names += ("iteration_tokens_total_sum", "prompt_tokens_cached_total")
    demo.complete(prompt="zero", max_tokens=1)  # steps of requests that an earlier test aborted are counted before it
    before = [demo.metric(name) for name in names]
    usage = demo.complete(prompt="one two three", max_tokens=7, ignore_eos=True)["usage"]
    after = [demo.metric(name) for name in names]
    *counts, cached = [new - old for new, old in zip(after, before, strict=True)]
    assert counts == [usage["prompt_tokens"], 7, 1, usage["prompt_tokens"] - cached + 7]
    assert demo.metric("num_requests_running") == 0


def test_metrics_tell_how_many_requests_of_full_length_the_cache_holds(demo):
    line = next(
        line for line in demo.client.get("/metrics").text.splitlines() if line.startswith("quire:cache_config_info{")
    )
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    requests = (int(labels["num_gpu_blocks"]) - 1) / 64  # without the null page; a request has 1,023 computed tokens
    assert float(labels["kv_cache_max_concurrency"]) == requests
    assert labels["kv_cache_size_tokens"] == str(int(requests * 1024))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("TEXT", r"TEXT named_metrics\.kv_cache_usage_perc=[\d.e-]+, named_metrics\.num_requests_waiting=\d+"),
        ("json", r'JSON \{"named_metrics":\{"kv_cache_usage_perc":[\d.e-]+,"num_requests_waiting":\d+\}\}'),
    ],
)
def test_a_load_balancer_is_told_of_the_load_where_it_asks(demo, wanted, told):
    body = {"prompt": "one two", "max_tokens": 2}
    for path in ("/v1/completions", "/health"):
        method = demo.client.post if path != "/health" else demo.client.get
        answer = method(
            path, headers={"endpoint-load-metrics-format": wanted}, **({"json": body} if path != "/health" else {})
        )
        assert re.fullmatch(told, answer.headers["endpoint-load-metrics"])
    odd = demo.client.get("/health", headers={"endpoint-load-metrics-format": "XML"})
    assert (
        "endpoint-load-metrics" not in odd.headers and "endpoint-load-metrics" not in demo.client.get("/health").headers
    )


def test_sigterm_finishes_a_running_stream_and_exits_with_0():
    server = DemoServer("--api-key", "secret", "--disable-uvicorn-access-log")
    assert server.client.get("/v1/models").status_code == 401
    assert server.client.get("/health").status_code == 200
    headers = {"Authorization": "Bearer secret"}
    body = {**LONG, "n": 4, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 4 * 900
    code, output = server.end()
    assert code == 0 and "Traceback" not in output and "Draining" in output


def test_ctrl_c_ends_at_once_without_a_trace():
    server = DemoServer()
    with server.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        code, output = server.end(signal.SIGINT)
        del lines
    assert code == 130 and "Traceback" not in output and "Exception" not in output


def test_a_model_that_is_not_there_is_one_message_and_exit_code_2():
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "/nowhere/at/all", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 2 and "/nowhere/at/all" in output and "Traceback" not in output


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def test_a_tool_call_is_the_same_streamed_and_whole_and_its_result_is_used(demo):
    client = demo.openai()
    messages: list = [{"role": "user", "content": "Use the calculator: 12 * 7"}]
    fields = {"model": "", "messages": messages, "tools": [CALCULATOR], "temperature": 0, "max_tokens": 80}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.function.name == "calculate"
    assert "12" in json.loads(call.function.arguments)["expression"]
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(**fields, stream=True):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        assert not choice.delta.content
        for part in choice.delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments, finish) == ("calculate", call.function.arguments, "tool_calls")
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "84"}]
    answer = client.chat.completions.create(**fields).choices[0]
    assert "84" in answer.message.content
    assert not answer.message.tool_calls


def test_reasoning_is_apart_from_the_answer_streamed_and_whole(demo):
    client = demo.openai()
    question = "Tom has 3 apples and buys 4 more. How many apples does he have?"
    fields = {
        "model": "", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.reasoning.strip()
    assert "think>" not in message.reasoning + message.content
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**fields, stream=True) if c.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    fields["extra_body"]["include_reasoning"] = False
    hidden = client.chat.completions.create(**fields).choices[0].message
    assert hidden.content == message.content
    assert hidden.reasoning is None
