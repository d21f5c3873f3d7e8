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
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) or os.listdir(tmp_path):
        assert time.monotonic() < deadline, (pids, os.listdir(tmp_path))
        time.sleep(0.01)
    assert not {name for name in os.listdir("/dev/shm") if "quire" in name} - shared
