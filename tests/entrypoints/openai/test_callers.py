"""Who a request is for, and how long it may take: from keys, headers and bodies to the engine."""

import time

import msgspec
import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.api_keys import KeyEntry, KeyRing, read_key_file
from quire.entrypoints.http.call import call_app
from quire.entrypoints.http.state import ServerSettings
from quire.entrypoints.server.app import build_app
from quire.errors import ConfigError

pytestmark = pytest.mark.anyio

LINES = "# our clients\nalice  key-a\nbob key-b 2.5\n\n"
JSON = '[{"name": "alice", "key": "key-a"}, {"name": "bob", "key": "key-b", "weight": 2.5}]'
BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 2}},
}


@pytest.mark.parametrize("text", [LINES, JSON])
def test_a_file_of_keys_has_names_and_weights(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    keys = read_key_file(str(path))
    assert keys == [KeyEntry("alice", "key-a"), KeyEntry("bob", "key-b", 2.5)]
    assert KeyEntry.of("plain").name.startswith("key-") and KeyEntry.of(keys[1]) is keys[1]
    found = KeyRing(["plain", *keys]).find(b"key-b")
    assert found is not None and (found.name, found.weight) == ("bob", 2.5) and found.key != "key-b"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key"),
        ("alice", "line 1 is not: NAME KEY"),
        ("alice k\nbob k 1 2", "line 2 is not: NAME KEY"),
        ("alice k much", "line 1 is not"),
        ("alice k 0", "the weight of 'alice' is 0"),
        ("alice k nan", "the weight of 'alice' is nan"),
        ("alice k\nbob k", "two keys are equal"),
        ('[{"name": "a"}]', "key"),
        ('[{"name": "a", "key": ""}]', "has no name, or is empty"),
        ('[{"name": "a", "key": "b", "share": 2}]', "share"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_with_the_place(tmp_path, text, why):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as refusal:
        read_key_file(str(path))
    assert refusal.value.setting == "api_key_file"


def test_a_file_of_keys_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(str(tmp_path / "none"))


async def test_a_keys_name_is_the_tenant_and_never_the_key_itself(server):
    engine = FakeAsyncLLM()
    async with server(engine, api_keys=["secret", KeyEntry("bob", "key-b", 2.5)]) as s:
        for key in ("secret", "key-b"):
            await s.client.post("/v1/completions", json=BODIES["/v1/completions"], headers={"X-Api-Key": key})
        assert (await s.client.post("/v1/completions", json={}, headers={"X-Api-Key": "bob"})).status_code == 401
    first, second = engine.callers
    assert first.tenant.startswith("key-") and "secret" not in first.tenant and first.weight == 1.0
    assert (second.tenant, second.weight) == ("bob", 2.5)


async def test_only_lines_of_batches_run_in_the_background(server):
    engine = FakeAsyncLLM()
    async with server(engine) as s:
        await s.complete(**BODIES["/v1/completions"])
        await call_app(build_app(s.state), "POST", "/v1/completions", msgspec.json.encode(BODIES["/v1/completions"]))
    assert [caller.is_background for caller in engine.callers] == [False, True]


async def test_a_header_names_the_tenant_only_where_the_operator_says_so(server):
    for settings, keys, tenant in (
        (ServerSettings(), (), ""),
        (ServerSettings(tenant_header="X-Tenant"), (), "t1"),
        (ServerSettings(tenant_header="X-Tenant"), [KeyEntry("gateway", "k", 3.0)], "gateway/t1"),
    ):
        engine = FakeAsyncLLM()
        async with server(engine, settings=settings, api_keys=keys) as s:
            headers = {"X-Tenant": "t1", "Authorization": "Bearer k"}
            await s.client.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
            await s.client.post("/v1/completions", json=BODIES["/v1/completions"], headers={"X-Api-Key": "k"})
        assert [caller.tenant for caller in engine.callers] == [tenant, tenant.removesuffix("t1").removesuffix("/")]


@pytest.mark.parametrize("path", BODIES)
async def test_every_protocol_takes_a_timeout_in_its_body_or_a_header_and_the_shorter_one_holds(server, path):
    engine = FakeAsyncLLM()
    async with server(engine) as s:
        for fields, header in (({"timeout": 50}, None), ({}, "20"), ({"timeout": 50}, "20"), ({}, None)):
            headers = {"X-Request-Timeout": header} if header else {}
            answer = await s.client.post(path, json=BODIES[path] | fields, headers=headers)
            assert answer.status_code == 200, answer.text
    now = time.monotonic()
    left = [caller.deadline - now if caller.deadline else None for caller in engine.callers]
    assert left[3] is None
    assert 40 < left[0] <= 50 and 10 < left[1] <= 20 and 10 < left[2] <= 20


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "1e12"])
async def test_a_timeout_that_is_none_is_a_400_that_names_it(server, timeout):
    async with server() as s:
        body = BODIES["/v1/completions"]
        answer = await s.client.post("/v1/completions", json=body, headers={"X-Request-Timeout": timeout})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Timeout"
        answer = await s.client.post("/v1/completions", json=body | {"timeout": 0})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"


async def test_beams_and_their_priority_reach_the_engine(server):
    engine = FakeAsyncLLM()
    given: list[int] = []
    search = engine.beam_search

    def beam_search(*args, priority=0):
        given.append(priority)
        return search(*args, priority=priority)

    engine.beam_search = beam_search
    async with server(engine) as s:
        answer = await s.complete(prompt="abc", max_tokens=2, n=2, use_beam_search=True, priority=-3)
        assert answer.status_code == 200, answer.text
    assert given == [-3]
