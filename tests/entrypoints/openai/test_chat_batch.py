"""`/v1/chat/completions/batch`: each conversation is answered as it is alone."""

import pytest
from tests.entrypoints.openai.conftest import serve
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.state import ServerSettings
from quire.errors import EngineError

PATH = "/v1/chat/completions/batch"
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("one", "two", "the third")]
FIELDS = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "echo": True}

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("n", [1, 3])
async def test_every_conversation_has_the_answers_that_it_has_alone(n):
    async with serve(settings=ServerSettings(enable_prompt_tokens_details=True)) as s:
        alone = [
            (await s.client.post("/v1/chat/completions", json={"messages": messages, "n": n, **FIELDS})).json()
            for messages in CONVERSATIONS
        ]
        batch = (await s.client.post(PATH, json={"messages": CONVERSATIONS, "n": n, **FIELDS})).json()
    choices = [choice for answer in alone for choice in answer["choices"]]
    assert batch["choices"] == [choice | {"index": index} for index, choice in enumerate(choices)]
    assert [batch[name] for name in ("prompt_token_ids", "prompt_text", "metrics")] == [None] * 3
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(answer["usage"][name] for answer in alone)
    assert batch["usage"]["prompt_tokens_details"]["cached_tokens"] == 9


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "0 conversations"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]", "expected `array`"),
        ({"messages": CONVERSATIONS * 400}, "messages", "1200 conversations; 1 to 1024"),
        ({"n": 16384}, "n", "16384 answers to 3 conversations"),
        ({"messages": [CONVERSATIONS[0], []]}, "messages[1]", "messages[1]"),
        ({"messages": [CONVERSATIONS[0], [*CONVERSATIONS[0], {"role": 5}]]}, "messages[1][1].role", "expected a string"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user"}]]}, "messages[1][0].content", "messages[1][0].content"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "a" * 999}]]}, "messages[1]", "512"),
        ({"stream": True}, "stream", "not available"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not available"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"model": "nope"}, "model", "nope"),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_refused_by_its_path(fields, param, words):
    async with serve() as s:
        refused = await s.client.post(PATH, json={"messages": CONVERSATIONS, "max_tokens": 4, **fields})
        assert refused.status_code == (404 if param == "model" else 400) and not s.engine.started
    error = refused.json()["error"]
    assert error["param"] == param and words in error["message"]


async def test_one_that_fails_ends_the_others():
    engine = FakeAsyncLLM()
    engine.failure, engine.fail_after = EngineError("broken"), 2
    async with serve(engine) as s:
        failed = await s.client.post(PATH, json={"messages": CONVERSATIONS, "max_tokens": 4})
        assert failed.status_code == 500 and len(engine.aborted) == len(engine.started) == 3
