"""Disaggregated prefill by the router: who is asked for what, what happens without a prefill server, and real servers' texts."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from tests.engine.test_lent_pages import LIBRARIES
from tests.entrypoints.route.test_router_app import running
from tests.oracles.server_process import SERVE, ServerProcess

from quire.entrypoints.http_client import Target
from quire.entrypoints.route.router_app import Router

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARAMS = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 7}
LONG = "a prompt that is worth sending elsewhere " * 10
Body = dict[str, Any]


class Scripted:
    """A server that keeps what it is asked, and answers as it is told."""

    def __init__(self, answer: Body, status: int = 200, wait: asyncio.Event | None = None) -> None:
        self.asked: list[Body] = []
        self._answer, self._status, self._wait = answer, status, wait

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if scope["method"] == "POST":
            self.asked.append(json.loads(body))
            if self._wait is not None:
                await self._wait.wait()
        data = json.dumps(self._answer).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": self._status, "headers": head})
        await send({"type": "http.response.body", "body": data})


@contextlib.asynccontextmanager
async def routed(prefill: Scripted, decode: Scripted, **more: Any) -> AsyncGenerator[tuple[str, Router]]:
    async with running(prefill, "off") as first, running(decode, "off") as second:
        router = Router([Target.parse(second)], check_every_s=60, prefill=[Target.parse(first)], **more)
        async with running(router) as url:
            yield url, router


def run(prefill: Scripted, act: Callable[[httpx.AsyncClient, str, Router], Any], **more: Any) -> list[Body]:
    """What the server that answers was asked."""
    decode = Scripted({"choices": []})

    async def main() -> None:
        async with routed(prefill, decode, **more) as (url, router), httpx.AsyncClient(timeout=60) as client:
            await act(client, url, router)

    asyncio.run(main())
    return decode.asked


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        (COMPLETIONS, {"prompt": LONG}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "max_completion_tokens"),
    ],
)
def test_one_token_is_asked_of_the_one_and_the_whole_answer_of_the_other(path: str, prompt: Body, limit: str) -> None:
    prefill = Scripted({"kv_transfer_params": PARAMS})
    body = {**prompt, limit: 50, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "min_tokens": 4}

    async def act(client: httpx.AsyncClient, url: str, router: Router) -> None:
        assert (await client.post(url + path, json=body | {"seed": 5})).status_code == 200
        told = (await client.get(url + "/replicas")).json()
        assert told["prefill"][0]["requests"] == 1 and told["prefill_missed"] == 0
        assert told["prefill"][0]["open_requests"] == told["prefill"][0]["waiting_tokens"] == 0

    answered = run(prefill, act)
    assert answered == [body | {"seed": 5, "kv_transfer_params": PARAMS}]
    (asked,) = prefill.asked
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {**prompt, limit: 1, "stream": False, "n": 1, "seed": 5}


@pytest.mark.parametrize(
    ("answer", "status"), [({"error": "x"}, 500), ({}, 200), ({"kv_transfer_params": 3}, 200), ([], 200)]
)
def test_without_params_the_other_one_computes_the_prompt(answer: Any, status: int) -> None:
    body = {"prompt": LONG, "seed": 1}

    async def act(client: httpx.AsyncClient, url: str, router: Router) -> None:
        assert (await client.post(url + COMPLETIONS, json=body)).status_code == 200
        assert router.prefill is not None and router.prefill.num_missed == 1

    assert run(Scripted(answer, status), act) == [body]


def test_a_prefill_server_that_takes_too_long_is_not_waited_for() -> None:
    body = {"prompt": LONG, "seed": 1}

    async def act(client: httpx.AsyncClient, url: str, router: Router) -> None:
        never.clear()
        assert (await client.post(url + COMPLETIONS, json=body)).status_code == 200
        never.set()

    never = asyncio.Event()
    assert run(Scripted({"kv_transfer_params": PARAMS}, wait=never), act, prefill_timeout_s=0.2) == [body]


def test_short_prompts_other_routes_and_whole_prompts_wanted_are_left_alone() -> None:
    asked = [
        (COMPLETIONS, {"prompt": "short", "seed": 1}),
        (COMPLETIONS, {"prompt": LONG, "seed": 1, "echo": True}),
        (COMPLETIONS, {"prompt": LONG, "seed": 1, "kv_transfer_params": {"do_remote_prefill": True}}),
        ("/v1/embeddings", {"input": LONG}),
    ]

    async def act(client: httpx.AsyncClient, url: str, router: Router) -> None:
        for path, body in asked:
            assert (await client.post(url + path, json=body)).status_code == 200

    prefill = Scripted({"kv_transfer_params": PARAMS})
    assert run(prefill, act) == [body for _, body in asked] and not prefill.asked


def test_a_prefill_server_that_is_gone_gets_no_requests_until_it_is_back() -> None:
    decode = Scripted({"choices": []})

    async def main() -> None:
        async with running(decode, "off") as url, httpx.AsyncClient(timeout=60) as client:
            nobody = Target.parse("http://127.0.0.1:9")
            router = Router([Target.parse(url)], check_every_s=60, prefill=[nobody])
            async with running(router) as address:
                for _ in range(2):
                    assert (await client.post(address + COMPLETIONS, json={"prompt": LONG})).status_code == 200
                assert router.prefill is not None and not router.prefill.pool.replicas[0].is_up

    asyncio.run(main())
    assert len(decode.asked) == 2


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _server(role: str = "", connector: str = "tcp") -> ServerProcess:
    flags = (
        "quire-demo",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--kv-cache-memory-bytes",
        "64M",
    )
    if not role:
        return ServerProcess(*SERVE, *flags)
    transfer = {"kv_connector": connector, "kv_role": role, "kv_port": _free_port()}
    return ServerProcess(*SERVE, *flags, "--kv-transfer-config", json.dumps(transfer))


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["tcp", "nccl", "nixl", "mooncake"])
def test_streams_by_two_servers_have_the_texts_of_one_also_when_the_first_one_is_killed(connector: str) -> None:
    if connector in LIBRARIES:
        pytest.importorskip(LIBRARIES[connector], exc_type=ImportError)
    servers = [_server("kv_producer", connector), _server("kv_consumer", connector), _server()]
    prefill, decode, alone = servers
    flags = ("route", "--port", "0", "--backend", decode.url, "--prefill", prefill.url)
    servers.append(router := ServerProcess(*SERVE[:2], *flags, ready=" servers at "))

    def body(number: int) -> Body:
        story = f"{number}. Once upon a time there was a small town by the sea. " * 8
        return {"model": "quire-demo", "prompt": story, "max_tokens": 40, "seed": number, "ignore_eos": True}

    async def text(client: httpx.AsyncClient, url: str, number: int) -> str:
        return (await client.post(url + COMPLETIONS, json=body(number))).json()["choices"][0]["text"]

    def hits(server: ServerProcess) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("quire:prompt_tokens_cached_total")]
        return float(line.split()[-1])

    async def main() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            expected = [await text(client, alone.url, number) for number in range(12)]
            first = [await text(client, router.url, number) for number in range(4)]
            assert first == expected[:4] and hits(decode) > 400
            tasks = [asyncio.ensure_future(text(client, router.url, number)) for number in range(4, 12)]
            before = prefill.client.get("/metrics").text
            while prefill.client.get("/metrics").text == before:
                await asyncio.sleep(0.001)
            prefill.popen.send_signal(signal.SIGKILL)
            assert await asyncio.gather(*tasks) == expected[4:]
            told = (await client.get(router.url + "/replicas")).json()
            assert told["prefill"][0]["is_up"] is False

    try:
        asyncio.run(main())
    finally:
        for server in servers:
            server.kill()
