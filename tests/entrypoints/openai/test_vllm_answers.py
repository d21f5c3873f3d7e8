"""What clients of vLLM read in answers: fields that are null, logprobs with the sampled token, usage, errors in its words."""

import json
from typing import Any

import pytest
from msgspec.structs import astuple
from tests.entrypoints.openai.test_openai_answers import events

from quire.entrypoints.http.long_bodies import chained, pieces_of
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.openai.logprobs import CompletionTokens, chat_logprobs
from quire.entrypoints.openai.protocol import CompletionLogprobs
from quire.errors import EngineDeadError
from quire.logprobs import Logprob

pytestmark = pytest.mark.anyio


async def test_fields_without_a_value_are_null(server):
    async with server() as s:
        chat = (await s.chat()).json()
        for name in (
            "prompt_logprobs",
            "prompt_token_ids",
            "prompt_text",
            "service_tier",
            "kv_transfer_params",
            "metrics",
        ):
            assert chat[name] is None
        assert chat["choices"][0]["token_ids"] is None
        for name in ("reasoning", "annotations", "audio", "function_call", "refusal"):
            assert chat["choices"][0]["message"][name] is None
        completion = (await s.complete()).json()
        for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "logprobs", "stop_reason"):
            assert completion["choices"][0][name] is None
        for fields in ({}, {"logprobs": 1}):
            chunk = events((await s.complete(stream=True, **fields)).text)[0]["choices"][0]
            assert chunk["prompt_token_ids"] is None and chunk["token_ids"] is None


async def test_a_chat_stream_tells_its_prompt_in_the_first_chunk(server):
    async with server() as s:
        first, *others = events((await s.chat(stream=True, return_token_ids=True, return_prompt_text=True)).text)
        prompt = "<user>hi</user><assistant>"
        assert first["prompt_token_ids"] == list(prompt.encode()) and first["prompt_text"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in others)


async def test_usage_in_every_chunk_needs_include_usage(server):
    async with server() as s:
        for ask in (s.chat, s.complete):
            chunks = events((await ask(stream=True, stream_options={"continuous_usage_stats": True})).text)
            assert all("usage" not in chunk for chunk in chunks)


async def test_an_operator_can_have_usage_in_every_chunk_of_every_stream(server):
    async with server(settings=ServerSettings(enable_force_include_usage=True)) as s:
        for ask in (s.chat, s.complete):
            chunks = events((await ask(stream=True)).text)
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 4 and chunks[-1]["choices"] == []


async def test_the_sampled_token_is_among_a_completions_top_logprobs(server):
    async with server() as s:
        none = (await s.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert none["top_logprobs"][0] == {"A": -0.5}
        one = (await s.complete(logprobs=3)).json()["choices"][0]["logprobs"]
        assert one["top_logprobs"][0] == {"A": -0.5, "B": -0.25, "C": -0.5}


POSITION = {5: Logprob(-3.0, 9, "five"), 7: Logprob(-0.5, 1, "seven"), 8: Logprob(-1.0, 2, "eight")}


def test_named_tokens_are_shown_behind_the_sampled_one():
    tokens = CompletionTokens(None, False, None, True)
    assert list(tokens.write([5], [POSITION]).top_logprobs[0].items()) == [
        ("five", -3.0),
        ("seven", -0.5),
        ("eight", -1.0),
    ]
    entries = chat_logprobs([5], [POSITION], None, False).content[0].top_logprobs
    assert [entry.token for entry in entries] == ["five", "seven", "eight"]


def test_of_two_tokens_with_one_text_the_sampled_one_is_shown():
    position = {5: Logprob(-3.0, 9, "a"), 7: Logprob(-0.5, 1, "a")}
    assert CompletionTokens(1, False, None, True).write([5], [position]).top_logprobs == [{"a": -3.0}]


async def test_an_echoed_prompt_has_its_first_tokens_text_and_offsets_that_fit(server):
    async with server() as s:
        for stream in (False, True):
            answer = await s.complete(prompt="xyz", echo=True, logprobs=1, stream=stream)
            choices = [chunk["choices"][0] for chunk in events(answer.text)] if stream else answer.json()["choices"]
            text = "".join(choice["text"] for choice in choices)
            parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            tokens = [token for part in parts for token in part["tokens"]]
            offsets = [offset for part in parts for offset in part["text_offset"]]
            assert text == "xyzXYZX" and tokens == ["", *"xyzXYZX"], "the token that begins a sequence has no text here"
            assert offsets == [0, 0, 1, 2, 3, 4, 5, 6]
            assert parts[0]["token_logprobs"][0] is None and parts[0]["top_logprobs"][0] is None


def test_logprobs_of_a_long_echoed_prompt_are_made_a_piece_at_a_time_while_they_are_sent(monkeypatch):
    made, best = [], CompletionTokens._best
    monkeypatch.setattr(CompletionTokens, "_best", lambda self, *where: made.append(where) or best(self, *where))
    positions = [None, *({5: Logprob(-1.0, 1, "five"), 7: Logprob(-2.0, 2, "seven")} for _ in range(30_000))]
    tokens = CompletionTokens(2, False, None, True)
    prompt = tokens.write_prompt([5] * 30_001, positions, "five" * 30_000)
    whole = CompletionLogprobs(*map(chained, astuple(prompt), astuple(tokens.write([7], [POSITION]))))
    assert len(made) == 1, "the answer's"
    text, most, before = b"", 0, len(made)
    for piece in pieces_of(whole):
        text, most, before = text + piece, max(most, len(made) - before), len(made)
    assert most < 10_000 < 30_000 < len(made)
    sent = json.loads(text)
    assert {name: len(each) for name, each in sent.items()} == dict.fromkeys(sent, 30_002)
    assert sent["top_logprobs"][30_000:] == [
        {"five": -1.0, "seven": -2.0},
        {"seven": -0.5, "eight": -1.0},
    ]
    assert sent["text_offset"][29_999:] == [119_992, 119_996, 120_000]


def test_a_hidden_special_token_takes_no_room():
    class Hiding:
        token_bytes = None
        special_ids = frozenset({5})

    positions = [{5: Logprob(-1.0, 1, "<s>")}, {7: Logprob(-1.0, 1, "ab")}, {8: Logprob(-1.0, 1, "c")}]
    hiding: Any = Hiding()
    assert CompletionTokens(0, False, hiding, True).write([5, 7, 8], positions).text_offset == [0, 0, 2]
    assert CompletionTokens(0, False, hiding, False).write([5, 7, 8], positions).text_offset == [0, 3, 5]


async def test_a_completion_keeps_as_much_of_its_prompt_as_leaves_room_for_the_answer(server):
    async with server() as s:
        answer = await s.complete(prompt="a" * 600, truncate_prompt_tokens=-1, max_tokens=12)
        assert answer.json()["usage"]["prompt_tokens"] == 500
        answer = await s.complete(prompt=[97] * 600, truncate_prompt_tokens=-1, max_tokens=5000)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


async def error_of(response: Any) -> tuple[int, str, int | str | None]:
    error = response.json()["error"]
    return response.status_code, error["type"], error["code"]


async def test_errors_can_have_vllms_words(server):
    settings = ServerSettings(error_format="vllm")
    async with server(settings=settings, api_keys=["k"]) as s:
        head = {"authorization": "Bearer k"}
        s.client.headers.update(head)
        assert await error_of(await s.chat(temperature=-1)) == (400, "BadRequestError", 400)
        assert await error_of(await s.chat(model="no")) == (404, "NotFoundError", 404)
        assert await error_of(await s.chat(messages=3)) == (400, "Bad Request", 400)
        assert await error_of(await s.client.get("/nothing")) == (404, "Not Found", 404)
        assert await error_of(await s.client.get("/v1/completions")) == (405, "Method Not Allowed", 405)
        s.engine.failure, s.engine.fail_after = EngineDeadError("gone"), 1
        assert await error_of(await s.complete()) == (503, "ServiceUnavailableError", 503)
        last = events((await s.complete(stream=True)).text)[-1]
        assert last["error"]["code"] == 503 and last["error"]["type"] == "ServiceUnavailableError"
        s.client.headers.pop("authorization")
        assert await error_of(await s.chat()) == (401, "Unauthorized", 401)
