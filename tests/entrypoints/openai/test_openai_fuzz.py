"""Whatever a client sends, the answer is never a 5xx and the next request is served."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/chat/completions/batch": (
        BatchChatRequest,
        {"messages": [[{"role": "user", "content": "x"}]], "max_tokens": 2},
    ),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}),
}
NUMBERS = st.one_of(st.integers(-3, 40), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


def bodies(path: str) -> st.SearchStrategy[dict]:
    """A body that would be served, with a few of its fields replaced by anything."""
    kind, good = ROUTES[path]
    fields = st.sampled_from([*kind.__struct_encode_fields__, "unknown"])
    return st.dictionaries(fields, JSON, max_size=3).map(lambda changes: {**good, **changes})


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_in_any_field_is_served_or_refused(server, path, data):
    body = data.draw(bodies(path))

    async def ask() -> tuple[int, str, int]:
        async with server() as s:
            response = await s.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            return response.status_code, response.text, (await s.complete()).status_code

    status, text, next_status = asyncio.run(ask())
    assert status in (200, 400, 404), text
    assert next_status == 200
    if status != 200:
        shape = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
        assert set(json.loads(text)["error"]) == shape


@given(raw=st.binary(max_size=60))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(server, raw):
    async def ask() -> int:
        async with server() as s:
            headers = {"content-type": "application/json"}
            return (await s.client.post("/v1/completions", content=raw, headers=headers)).status_code

    assert asyncio.run(ask()) == 400
