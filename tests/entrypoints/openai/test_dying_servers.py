"""Real servers whose processes are killed: streams go on behind the core's death, and nothing is left behind the server's."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.entrypoints.openai.test_pushed_streams import events_of
from tests.oracles.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.timeout(180)
BODY = {"prompt": "What is 17 + 25?", "max_tokens": 300, "min_tokens": 300, "stream": True, "temperature": 1}


def serve(*flags: str) -> ServerProcess:
    return ServerProcess(*SERVE, "--port", "0", "--disable-uvicorn-access-log", *flags)


async def texts(server: ServerProcess, count: int) -> list[str]:
    """The answers to as many requests at once, which differ in their seeds; each on a connection of its own."""

    async def one(seed: int) -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            response = await client.post("/v1/completions", json={**BODY, "seed": seed})
        events = events_of(response.content)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in events)

    return await asyncio.gather(*map(one, range(count)))


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")])
def test_streams_go_on_behind_the_death_of_the_core(flags: tuple[str, ...]) -> None:
    server = serve("--deterministic", *flags)

    async def main() -> None:
        expected = await texts(server, 8)
        task = asyncio.ensure_future(texts(server, 8))
        for _ in range(2):
            await asyncio.sleep(0.3)
            (core,) = server.children("core_process")
            os.kill(core, signal.SIGKILL)
            while server.children("core_process") in ([], [core]):
                await asyncio.sleep(0.05)
        assert await task == expected

    asyncio.run(main())
    code, output = server.end(signal.SIGTERM)
    num_deaths = output.count("is started again") + output.count("is tried once more")  # of one that was starting
    assert code == 0 and "Traceback" not in output and num_deaths >= 2


LONG = {"max_tokens": 3000, "ignore_eos": True, "stream": True, "temperature": 0}
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
PROTOCOLS = {
    "/v1/completions": {"prompt": "a", **LONG},
    "/v1/chat/completions": {"messages": QUESTION, **LONG},
    "/v1/messages": {"messages": QUESTION, **LONG},
    "/v1/responses": {"input": "a", "max_output_tokens": 3000, "ignore_eos": True, "stream": True},
    "/inference/v1/generate": {"token_ids": [5, 6], "stream": True, "sampling_params": {"max_tokens": 3000}},
}


def test_what_does_not_end_while_the_server_drains_is_told_so_in_its_protocol() -> None:
    server = serve("--shutdown-timeout", "0")
    reason = "The server ends before the answer is complete."

    async def read(client: httpx.AsyncClient, path: str, begun: list[str]) -> str:
        async with client.stream("POST", path, json=PROTOCOLS[path]) as response:
            assert response.status_code == 200
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if path not in begun:
                    begun.append(path)
                    if len(begun) == len(PROTOCOLS):
                        server.popen.send_signal(signal.SIGTERM)
            return text

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            whole = asyncio.ensure_future(
                client.post("/v1/completions", json=PROTOCOLS["/v1/completions"] | {"stream": False})
            )
            begun: list[str] = []
            texts = await asyncio.gather(*(read(client, path, begun) for path in PROTOCOLS))
            for path, text in zip(PROTOCOLS, texts, strict=True):
                assert text.count(reason) == 1, (path, text[-500:])
            answer = await whole
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["message"] == reason and answer.json()["error"]["code"] == "unavailable"

    asyncio.run(main())
    code, output = server.end()
    assert code == 1 and "Traceback" not in output and "6 request(s) did not end in 0 s and are cut off" in output


@pytest.mark.parametrize("flags", [(), pytest.param(("--api-server-count", "2"), marks=pytest.mark.exhaustive)])
def test_nothing_is_left_of_a_server_that_is_killed(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    server = serve(*flags)
    pids = descendants(server.popen.pid)
    assert pids
    server.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) or os.listdir(tmp_path):
        assert time.monotonic() < deadline, (pids, os.listdir(tmp_path))
        time.sleep(0.01)
    assert not {name for name in os.listdir("/dev/shm") if "quire" in name} - shared
