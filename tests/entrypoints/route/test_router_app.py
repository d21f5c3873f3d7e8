"""The router before real servers over the hash model, and before one whose streams break off."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.engine.builders import write_model_folder
from tests.oracles.server_process import ServerProcess

from quire.entrypoints.http.backend_link import exchange
from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.entrypoints.http_client import Target
from quire.entrypoints.route.router_app import Router

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[ServerProcess], None, None]:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"))
    started = [ServerProcess("-m", "tests.oracles.hash_server", str(folder), "inproc", "2000") for _ in range(2)]
    yield started
    for server in started:
        server.kill()


@contextlib.asynccontextmanager
async def running(app: Any, lifespan: str = "on") -> AsyncGenerator[str, None]:
    """An application at an address."""
    listener, options = open_socket(ListenOptions(port=0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan=lifespan))  # type: ignore[arg-type]
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        yield options.url
    finally:
        server.should_exit = True
        await task
        listener.close()


class Cutting:
    """A server that asks another one, and breaks streams off behind some events."""

    def __init__(self, url: str, num_events: int) -> None:
        self._target, self._num_events = Target.parse(url), num_events
        self.num_cut = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        async with exchange(self._target, scope["method"], scope["path"], scope["headers"], body) as answer:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            left = self._num_events
            async for event in answer.events() if answer.is_stream else answer.body():
                if answer.is_stream and not left:
                    self.num_cut += 1
                    raise ConnectionError("cut")  # uvicorn closes the connection within the answer
                left -= 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def question(number: int, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {
        "model": "hash",
        "prompt": [5, number, 9],
        "max_tokens": max_tokens,
        "seed": number,
        "ignore_eos": True,
    } | more


async def text_of(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    """A stream's text; each event has the same id, and the last one is [DONE]."""
    text, ids, last = "", set[str](), ""
    async with client.stream("POST", url + PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                last = line[6:]
                if last != "[DONE]":
                    chunk = json.loads(last)
                    assert "error" not in chunk, chunk
                    ids.add(chunk["id"])
                    text += "".join(choice["text"] for choice in chunk["choices"])
    assert last == "[DONE]" and len(ids) == 1
    return text


async def whole_text(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    return (await client.post(url + PATH, json=body)).json()["choices"][0]["text"]


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_stream_that_breaks_off_goes_on_at_another_server_with_the_same_tokens(
    servers: list[ServerProcess], num_events: int
) -> None:
    async def main() -> None:
        cutting = Cutting(servers[0].url, num_events)
        async with running(cutting, "off") as url, httpx.AsyncClient(timeout=60) as client:
            router = Router([Target.parse(url), Target.parse(servers[1].url)], by_prefix=False, check_every_s=60)
            async with running(router) as routed:
                for number in range(4):
                    router.replicas[0].is_up = True
                    body = question(number)
                    assert await text_of(client, routed, body) == await whole_text(client, servers[0].url, body)
                    unseeded = await text_of(client, routed, question(number, seed=None))
                    assert len(unseeded) > 0
                assert router.num_continued == (cutting.num_cut if num_events else 0)
                assert cutting.num_cut > 0 or num_events > 1  # a busy server may send all text in one event
                assert all(load.cost == 0 for load in router._chooser.loads)

    asyncio.run(main())


def test_answers_pass_through_and_a_server_that_cannot_be_reached_is_passed_over(servers: list[ServerProcess]) -> None:
    async def main() -> None:
        nobody = Target.parse("http://127.0.0.1:9")
        router = Router([nobody, *(Target.parse(server.url) for server in servers)], check_every_s=60)
        async with running(router) as routed, httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(routed + "/health")).status_code == 200
            assert (await client.get(routed + "/v1/models")).json()["data"][0]["id"] == "hash"
            texts = [await whole_text(client, routed, question(number)) for number in range(4)]
            assert texts == [await whole_text(client, servers[0].url, question(number)) for number in range(4)]
            refused = await client.post(routed + PATH, json=question(0, max_tokens=-1))
            assert refused.status_code == 400 and "max_tokens" in refused.text
            stands = (await client.get(routed + "/replicas")).json()["replicas"]
            assert [row["is_up"] for row in stands] == [False, True, True]
            assert all(row["open_requests"] == 0 for row in stands)

    asyncio.run(main())


def test_without_any_server_the_error_says_so() -> None:
    async def main() -> None:
        router = Router([Target.parse("http://127.0.0.1:9")], check_every_s=60)
        await router.pool.check_once(0)
        async with running(router) as routed, httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(routed + "/health")).status_code == 503
            answer = await client.post(routed + PATH, json=question(0))
            assert answer.status_code == 502 and "cannot be reached" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_prompts_with_a_common_beginning_are_found_in_a_cache_more_often_than_by_load_alone(
    servers: list[ServerProcess],
) -> None:
    def hits(server: ServerProcess) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:prefix_cache_hits_total"))

    async def run(by_prefix: bool, salt: int) -> float:
        router = Router([Target.parse(server.url) for server in servers], by_prefix=by_prefix, check_every_s=60)
        before = sum(map(hits, servers))
        async with running(router) as routed, httpx.AsyncClient(timeout=60) as client:
            for turn in range(4):
                for number in range(3):  # three conversations over two servers: turns alternate
                    prompt = [salt + number] * 600 + [9] * turn
                    await whole_text(client, routed, question(number, 2, prompt=prompt))
        return sum(map(hits, servers)) - before

    async def main() -> None:
        by_load, by_prefix = await run(False, 20), await run(True, 30)
        assert by_prefix == pytest.approx(3 * 3 * 600, abs=3 * 3 * 4)  # all but each conversation's first turn
        assert by_load < 0.8 * by_prefix

    asyncio.run(main())


def test_streams_of_a_server_that_is_killed_end_with_the_tokens_that_it_would_have_sent(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    victim = ServerProcess("-m", "tests.oracles.hash_server", str(write_model_folder(tmp_path)), "inproc", "2000")
    router = ServerProcess(
        *(
            "-m",
            "quire.entrypoints.cli.main",
            "route",
            "--port",
            "0",
            "--backend",
            victim.url,
            "--backend",
            servers[0].url,
        ),
        ready=" servers at ",
    )

    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.ensure_future(text_of(client, router.url, question(number, 400))) for number in range(6)]
            while victim.client.get("/metrics").text.count("\nquire:generation_tokens_total{") == 0:
                await asyncio.sleep(0.01)
            victim.popen.send_signal(signal.SIGKILL)
            texts = await asyncio.gather(*tasks)
            assert texts == [await whole_text(client, servers[0].url, question(number, 400)) for number in range(6)]

    try:
        asyncio.run(main())
        code, _ = router.end(signal.SIGTERM)
        assert code in (0, -signal.SIGTERM)
    finally:
        victim.kill()
        router.kill()
