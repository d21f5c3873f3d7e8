"""Batches that are cut off: at any point, any number of times, every line is answered once in the end."""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.batches.protocol import BatchCreateRequest, BatchObject, BatchResult, ExpiresAfter
from quire.entrypoints.batches.runner import BatchRunner, Load, Window
from quire.entrypoints.batches.store import BatchStore
from quire.entrypoints.batches.tables import BatchFolder, Missing

CHILD = Path(__file__).with_name("batch_child.py")
pytestmark = pytest.mark.anyio


def request_line(name: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "url": "/x", "body": body}).encode() + b"\n"


class Kept:
    """A store whose time stands still until it is moved."""

    def __init__(self, path: Path) -> None:
        self.time = float(int(time.time()))
        self.folder = BatchFolder(str(path), "batch_store", lambda: self.time)
        self.store = BatchStore(self.folder)

    async def add(self, lines: Iterable[bytes], **fields: Any) -> BatchObject:
        upload = self.store.files.begin()
        for line in lines:
            await upload.write(line)
        await upload.finish()
        file = await self.store.files.add(upload, "in.jsonl", "batch", None)
        return await self.store.create(BatchCreateRequest(input_file_id=file.id, endpoint="/x", **fields))

    def runner(self, answer: Callable[[bytes], Awaitable[BatchResult]], size: int = 4, **options: Any) -> BatchRunner:
        return BatchRunner(self.store, answer, Window(size), (), 1 << 20, **options)

    async def get(self, batch: BatchObject) -> BatchObject:
        return (await self.store.get(batch.id)).batch

    async def names(self, file_id: str | None) -> list[str]:
        if file_id is None:
            return []
        content = b"".join([piece async for piece in await self.store.files.read(file_id)])
        return [json.loads(line)["custom_id"] for line in content.splitlines()]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "store")


async def echo(line: bytes) -> BatchResult:
    return BatchResult(custom_id=json.loads(line)["custom_id"])


def child(folder: Path, delay_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, str(CHILD), str(folder), str(delay_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def killed_runs(folder: Path, seed: int, num_lines: int, num_kills: int) -> None:
    """Run three batches in a process that is killed again and again; compare with what an uninterrupted run gives."""
    kept = Kept(folder)
    draw = random.Random(seed)
    names = [[f"{batch}-{number}" for number in range(num_lines)] for batch in range(3)]
    batches = [
        await kept.add(request_line(name, odd=index % 7 == 3) for index, name in enumerate(group)) for group in names
    ]
    for _ in range(num_kills):
        process = child(folder, 0.05)
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        await asyncio.sleep(draw.random() * 0.25)  # when it dies is drawn, and must not matter
        process.kill()
        process.wait()
    process = child(folder, 0.0)
    assert process.wait(120) == 0
    for group, batch in zip(names, batches, strict=True):
        over = await kept.get(batch)
        assert over.status == "completed"
        odd = [name for index, name in enumerate(group) if index % 7 == 3]
        assert await kept.names(over.error_file_id) == odd
        assert await kept.names(over.output_file_id) == [name for name in group if name not in odd]
        counts = over.request_counts
        assert (counts.total, counts.completed, counts.failed) == (len(group), len(group) - len(odd), len(odd))
    kept.folder.close()


async def test_a_killed_process_loses_and_repeats_nothing(tmp_path: Path) -> None:
    await killed_runs(tmp_path / "store", seed=1, num_lines=300, num_kills=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
async def test_twenty_kills_lose_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    await killed_runs(tmp_path / "store", seed, num_lines=2000, num_kills=20)


@pytest.mark.exhaustive
async def test_100_000_lines_need_no_memory_in_proportion(tmp_path: Path) -> None:
    async def peak_mib(count: int) -> int:
        kept = Kept(tmp_path / str(count))
        batch = await kept.add(request_line(str(number), text="x" * 1000) for number in range(count))
        process = await asyncio.to_thread(
            subprocess.run, [sys.executable, str(CHILD), str(tmp_path / str(count))], stdout=subprocess.PIPE, text=True
        )
        assert (await kept.get(batch)).request_counts.completed == count
        kept.folder.close()
        return int(process.stdout.splitlines()[-1].split()[0])

    few, many = await peak_mib(5_000), await peak_mib(100_000)
    assert many - few < 24, (few, many)  # the input has 100 MiB


@pytest.mark.parametrize("seed", range(10))
async def test_a_loop_that_ends_anywhere_is_followed_by_one_that_goes_on(seed: int, kept: Kept) -> None:
    draw = random.Random(seed)
    seen: Counter[str] = Counter()

    class Cut(Exception):
        pass

    async def answer(line: bytes) -> BatchResult:
        await asyncio.sleep(0)
        if draw.random() < 0.1:
            raise Cut
        seen[json.loads(line)["custom_id"]] += 1
        return await echo(line)

    names = [f"n{number}" for number in range(60)]
    batch = await kept.add(map(request_line, names))
    cuts = 0
    while (await kept.get(batch)).status != "completed":
        try:
            await kept.runner(answer).run(until_done=True)
        except Cut:
            cuts += 1
    assert cuts and await kept.names((await kept.get(batch)).output_file_id) == names
    assert sum(seen.values()) <= 60 + 4 * cuts  # what was in flight may be asked again, and nothing else


async def test_an_expired_batch_tells_what_it_has(kept: Kept) -> None:
    batch = await kept.add(map(request_line, "abc"), completion_window="2h")
    assert batch.expires_at == batch.created_at + 7200

    async def answer(line: bytes) -> BatchResult:
        if b'"b"' in line:
            kept.time += 7200
            await asyncio.Event().wait()
        return await echo(line)

    await kept.runner(answer, 1).run(until_done=True)
    over = await kept.get(batch)
    assert over.status == "expired" and over.expired_at == kept.time
    assert await kept.names(over.output_file_id) == ["a"] and await kept.names(over.error_file_id) == ["b", "c"]
    assert over.request_counts.failed == 2


async def test_files_expire(kept: Kept) -> None:
    limits = ExpiresAfter(seconds=3600)
    batch = await kept.add([request_line("a")], output_expires_after=limits)
    await kept.runner(echo).run(until_done=True)
    file_id = (await kept.get(batch)).output_file_id
    assert file_id is not None and (await kept.store.files.get(file_id)).expires_at == kept.time + 3600
    kept.time += 3600
    with pytest.raises(Missing):
        await kept.store.files.get(file_id)
    await kept.store.remove_old()
    rows = kept.store.files._database.run(
        lambda: kept.folder.database.connection.execute("SELECT * FROM lines").fetchall()
    )
    assert await rows == []


async def test_a_short_batch_does_not_wait_for_a_long_one(kept: Kept) -> None:
    order: list[str] = []
    long = await kept.add(request_line(f"long{number}") for number in range(2000))
    short: list[BatchObject] = []

    async def answer(line: bytes) -> BatchResult:
        result = await echo(line)
        order.append(result.custom_id or "")
        if len(order) == 300:
            short.append(await kept.add(request_line(f"short{number}") for number in range(5)))
        return result

    await kept.runner(answer).run(until_done=True)
    places = [place for place, name in enumerate(order) if name.startswith("short")]
    assert len(places) == 5 and places[-1] < 1900
    assert (await kept.get(long)).status == (await kept.get(short[0])).status == "completed"


def test_the_window_shrinks_while_online_requests_wait() -> None:
    window = Window(64)
    sizes: list[int] = []
    for _ in range(8):
        window.look(Load(is_waiting=True, is_online=True), window.size)
        sizes.append(window.size)
    assert sizes == [32, 16, 8, 4, 2, 1, 0, 0]
    window.look(Load(is_waiting=False, is_online=True), 0)
    assert window.size == 4
    for _ in range(20):
        window.look(Load(is_waiting=False, is_online=False), window.size)
    assert window.size == 64
    window.look(Load(is_waiting=True, is_online=False), 40)  # lines that wait for lines: no more of them
    assert window.size == 40


async def test_lines_give_way_to_online_requests_and_come_back(kept: Kept) -> None:
    load = Load(False, False)
    running: set[str] = set()
    given_up: list[str] = []
    gate = asyncio.Event()
    news = asyncio.Event()

    async def answer(line: bytes) -> BatchResult:
        result = await echo(line)
        name = result.custom_id or ""
        running.add(name)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            given_up.append(name)
            raise
        finally:
            running.discard(name)
            news.set()
        return result

    async def look() -> Load:
        return load

    names = [f"n{number:02}" for number in range(20)]
    batch = await kept.add(map(request_line, names))
    task = asyncio.create_task(kept.runner(answer, 8, load=look).run(until_done=True))
    while len(running) < 8:
        await asyncio.sleep(0.01)
    load = Load(is_waiting=True, is_online=True)
    while running:
        await news.wait()
        news.clear()
    assert sorted(given_up) == names[:8] and given_up[0] > given_up[-1]  # the youngest first
    load = Load(False, True)
    gate.set()
    await task
    over = await kept.get(batch)
    assert over.status == "completed" and await kept.names(over.output_file_id) == names


async def test_one_process_runs_the_batches(tmp_path: Path) -> None:
    first, second = Kept(tmp_path), Kept(tmp_path)
    assert first.folder.lock() and first.folder.lock() and not second.folder.lock()
    first.folder.close()
    assert second.folder.lock()
    second.folder.close()
