"""`quire serve --api-server-count`: real processes before one core, with the demo model. Only 127.0.0.1 is touched."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.entrypoints.openai.test_pushed_streams import events_of
from tests.oracles.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.timeout(180)
COUNT = 2
QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
LONG = {**QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1, "seed": 1}


class Server(ServerProcess):
    """The processes of one server, and what they print."""

    def __init__(self, *flags):
        super().__init__(*SERVE, "--port", "0", "--api-server-count", str(COUNT), *flags)

    def frontends(self):
        return self.children("frontend_child")


@pytest.fixture(scope="module")
def server():
    server = Server("--disable-uvicorn-access-log")
    yield server
    code, output = server.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in output


async def ask(server, **fields):
    """One question on a connection of its own."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await client.post("/v1/chat/completions", json={**QUESTION, **fields}, headers={"x-request-id": "same"})


async def streamed(server, count, then, **fields):
    """The bodies of as many streams, on connections of their own, or what ended them; `then` is called when all have begun."""
    num_begun = 0

    async def one():
        nonlocal num_begun
        client = httpx.AsyncClient(base_url=server.url, timeout=60)
        body = {**LONG, **fields}
        async with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            num_begun += 1
            if num_begun == count:
                then()
            return await response.aread()

    return await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)


def answer_of(response):
    assert response.status_code == 200
    return response.json()["choices"][0]["message"]["content"]


def test_requests_with_one_id_at_all_frontends_get_their_own_answers(server):
    async def main():
        streams = asyncio.gather(*(ask(server, **{**LONG, "max_tokens": 40, "seed": i % 4}) for i in range(32)))
        answers = await asyncio.gather(*(ask(server) for _ in range(32)))
        assert all("42" in answer_of(answer) for answer in answers)
        by_seed = [set(), set(), set(), set()]
        for number, response in enumerate(await streams):
            events = events_of(response.content)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            by_seed[number % 4].add(text)
        assert [len(texts) for texts in by_seed] == [1, 1, 1, 1]

    asyncio.run(main())


def test_every_frontend_tells_the_figures_of_all(server):
    async def main():
        async def total():
            async with httpx.AsyncClient(base_url=server.url) as client:
                text = (await client.get("/metrics")).text
                return sum(map(float, re.findall(r"quire:request_success_total\{.*?\} ([\d.]+)", text)))

        before = await total()
        for _ in range(12):
            assert "42" in answer_of(await ask(server))
        assert {await total() for _ in range(12)} == {before + 12}
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/load")).json() == {"server_load": 0}

    asyncio.run(main())


def test_a_frontend_that_dies_is_replaced_and_the_others_do_not_notice(server):
    async def main():
        victim, other = server.frontends()
        for body in await streamed(server, 8, lambda: os.kill(victim, signal.SIGKILL), max_tokens=600):
            if not isinstance(body, httpx.TransportError):  # those of the dead one are cut off, the others whole
                assert events_of(body)[-1]["choices"][0]["finish_reason"] == "length"
        while len(server.frontends()) < COUNT or victim in server.frontends():
            await asyncio.sleep(0.05)
        assert other in server.frontends()
        while "It is replaced" not in server.output:
            await asyncio.sleep(0.05)
        assert all("42" in answer_of(answer) for answer in await asyncio.gather(*(ask(server) for _ in range(24))))

    asyncio.run(main())


def test_sigterm_finishes_what_runs_and_ends_with_0():
    server = Server()

    async def main():
        for body in await streamed(server, 6, server.popen.terminate, max_tokens=300):
            assert events_of(body)[-1]["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())
    assert server.end()[0] == 0


def test_frontends_end_when_their_parent_is_killed():
    server = Server()
    frontends = server.frontends()
    server.kill()
    while any(map(is_alive, frontends)):
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
