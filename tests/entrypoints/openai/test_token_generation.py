"""`/inference/v1/generate`: token ids in, token ids out, whole and streamed, of the demo model."""

import asyncio

import pytest
from tests.entrypoints.openai.conftest import serve
from tests.entrypoints.openai.test_openai_answers import events

from quire import AsyncEngineArgs, AsyncLLMEngine

PATH = "/inference/v1/generate"
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    args = AsyncEngineArgs(model=None, max_model_len=64, num_gpu_blocks_override=200, max_num_seqs=8)
    engine = AsyncLLMEngine.from_engine_args(args, core="inproc")
    yield engine
    engine.shutdown()


def post(engine, path=PATH, **body):
    async def main():
        async with serve(engine) as server:
            return await server.client.post(path, json=body)

    return asyncio.run(main())


def generate(engine, **body):
    response = post(engine, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def prompt(engine):
    return engine.get_tokenizer().encode("one two three")


def test_the_tokens_are_those_of_a_completion(engine, prompt):
    completion = post(engine, "/v1/completions", prompt=prompt, return_token_ids=True, **GREEDY).json()
    told = generate(engine, token_ids=prompt, sampling_params=GREEDY, request_id="mine")
    (choice,) = told["choices"]
    assert choice["token_ids"] == completion["choices"][0]["token_ids"] and choice["finish_reason"] == "length"
    assert told["request_id"] == "generate-tokens-mine" and "text" not in choice and choice["logprobs"] is None
    assert told["usage"]["completion_tokens"] == 8 and told["usage"]["prompt_tokens"] == len(prompt)
    assert told["prompt_token_ids"] is None and told["prompt_logprobs"] is None and told["output_mode"] == "tokens"
    text = generate(engine, token_ids=prompt, sampling_params=GREEDY, output_mode="text")["choices"][0]["text"]
    assert text == completion["choices"][0]["text"]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 25?"}]


def test_a_request_can_be_rendered_here_and_run_there(engine):
    asked = {"messages": MESSAGES, "logit_bias": {"5": 1.5}, **GREEDY}
    answer = post(engine, "/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    rendered = post(engine, "/v1/chat/completions/render", request_id="mine", **asked).json()
    assert rendered["request_id"] == "chatcmpl-mine" and rendered["sampling_params"]["logit_bias"] == {"5": 1.5}
    assert generate(engine, **(rendered | {"output_mode": "text"}))["choices"][0]["text"] == answer
    longest = post(engine, "/v1/chat/completions/render", request_id="i" * 256, **asked).json()
    assert generate(engine, **longest)["request_id"] == "generate-tokens-chatcmpl-" + "i" * 256
    thread = {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:], "max_tokens": 8}
    assert post(engine, "/v1/messages/render", **thread).json()["token_ids"] == rendered["token_ids"]
    parts = post(engine, "/v1/completions/render", prompt=["one two three", [5, 6]], **GREEDY).json()
    whole = post(engine, "/v1/completions", prompt=["one two three", [5, 6]], **GREEDY).json()
    assert parts[1]["token_ids"] == [5, 6]
    told = [generate(engine, **(part | {"output_mode": "text"}))["choices"][0]["text"] for part in parts]
    assert told == [choice["text"] for choice in whole["choices"]]


def test_what_is_more_than_tokens_is_not_rendered(engine):
    refused = post(engine, "/v1/completions/render", prompt="one", use_beam_search=True, n=2, temperature=0)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "not_supported"
    assert post(engine, "/v1/chat/completions/render", messages=[]).status_code == 400


def test_an_answer_may_run_to_the_end_of_the_context(engine, prompt):
    told = generate(engine, token_ids=prompt, sampling_params={"ignore_eos": True, "temperature": 0})
    assert len(told["choices"][0]["token_ids"]) == 64 - len(prompt)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_streamed_parts_make_the_whole_answer(engine, prompt, n, mode):
    params = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "n": n, "logprobs": 2}
    body = {"token_ids": prompt, "sampling_params": params, "output_mode": mode, "return_token_ids": True}
    whole = generate(engine, **body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(post(engine, **body, stream=True, stream_options=options).text)
    assert chunks[0]["prompt_token_ids"] == prompt == whole["prompt_token_ids"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] == len(prompt) for chunk in chunks)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        key = "token_id" if mode == "tokens" else "token"
        assert [entry[key] for entry in content] == [entry[key] for entry in choice["logprobs"]["content"]]
        assert [entry["top_logprobs"][0][key] for entry in content] == [entry[key] for entry in content]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if mode == "text":
            assert "".join(part["text"] for part in parts) == choice["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5] * 64}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temprature": 0.5}}, "sampling_params.temprature"),
        ({"sampling_params": {"structured_outputs": {"json": {}, "regex": "a"}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params"),
        ({"sampling_params": None}, "sampling_params"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(engine, body, param):
    response = post(engine, **{"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_parameters_that_ask_for_nothing_may_be_unknown(engine, prompt):
    params = {**GREEDY, "output_kind": 2, "skip_clone": False, "routed_experts_prompt_start": None}
    structured = {"structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {"5": 1.0}, "ignore_eos": False}
    told = generate(engine, token_ids=prompt, sampling_params=params | structured, output_mode="text")
    assert told["choices"][0]["text"] in ("yes", "no")


def test_logits_may_be_told_in_place_of_logprobs_and_nothing_is_ranked_by_them(engine, prompt):
    args = AsyncEngineArgs(
        model=None, max_model_len=64, num_gpu_blocks_override=200, max_num_seqs=8, logprobs_mode="raw_logits"
    )
    of_logits = AsyncLLMEngine.from_engine_args(args, core="inproc")
    try:
        body = {"token_ids": prompt, "sampling_params": {**GREEDY, "logprobs": 3, "prompt_logprobs": 1}}
        logits, logprobs = (generate(each, **body)["choices"][0]["logprobs"]["content"] for each in (of_logits, engine))
        for high, low in zip(logits, logprobs, strict=True):
            gaps = [a["logprob"] - b["logprob"] for a, b in zip(high["top_logprobs"], low["top_logprobs"], strict=True)]
            assert gaps == pytest.approx([gaps[0]] * len(gaps), abs=1e-4) and gaps[0] > 0
        for refused in ({"best_of": 2}, {"use_beam_search": True, "n": 2}):
            response = post(of_logits, "/v1/completions", prompt=prompt, **refused)
            assert response.status_code == 400 and "logprobs_mode" in response.json()["error"]["message"]
        scores = {"query": prompt, "items": [[5]], "label_token_ids": [6, 7]}
        assert post(of_logits, "/generative_scoring", **scores).status_code == 200
        assert post(of_logits, "/generative_scoring", **scores, apply_softmax=False).status_code == 400
    finally:
        of_logits.shutdown()
