"""A load: prepared requests, sent at their times by one process or by several.

Knows when to send and how many at once. What a request says was decided before; what its times mean is decided after.
Run as a module it is one of several client processes: it reads its share from standard input and writes what it saw to
standard output, as msgpack.
"""

import asyncio
import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import msgspec

from quire.benchmarks.http_load import Client, RequestRecord
from quire.descriptors import raise_limit
from quire.entrypoints.http_client import Target
from quire.errors import EngineError
from quire.processes import read_message, start_child, write_message

START_DELAY_S = 0.05
"""From the last process's being ready to the load's start."""


class LoadJob(msgspec.Struct):
    """What one client process has to do.

    Attributes:
        bodies: each request's JSON.
        times: when each is sent, in seconds from the start, ascending.
        max_concurrency: most requests at once; 0 means no limit.
    """

    target: Target
    path: str
    bodies: list[bytes]
    times: list[float]
    max_concurrency: int = 0
    keep_text: bool = False
    show_progress: bool = False


class LoadResult(msgspec.Struct):
    """What the clients saw.

    Attributes:
        records: of each request, in the order of the job.
        began: `time.perf_counter()` at the start.
        cpu_share: share of one core that the busiest client process used; near 1 the client is what is measured.
        max_lag_s: the longest that a request was sent after its time, concurrency limits aside.
    """

    records: list[RequestRecord]
    began: float
    cpu_share: float
    max_lag_s: float


def run_load(job: LoadJob, num_clients: int = 1) -> LoadResult:
    """Send everything and wait for every answer. Raises EngineError: a client process died."""
    num_clients = min(num_clients, len(job.bodies), job.max_concurrency or len(job.bodies))
    if num_clients > 1:
        return _run_processes(job, num_clients)
    return _run_here(job, None)


def _run_here(job: LoadJob, began: float | None) -> LoadResult:
    """Send a job's requests from this process; the clock starts at `began`, or when all is prepared."""
    raise_limit((job.max_concurrency or len(job.bodies)) + 64)
    gc.collect()
    gc.disable()
    try:
        return run_coroutine(_send_all(job, began))
    finally:
        gc.enable()


def run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _send_all(job: LoadJob, start: float | None) -> LoadResult:
    head = job.target.request_head(job.path)
    client = Client(job.target, job.keep_text)
    with contextlib.suppress(OSError):  # each request will tell
        await client.find_address()
    gate = asyncio.Semaphore(job.max_concurrency) if job.max_concurrency else None
    records = [RequestRecord() for _ in job.bodies]
    max_lag = 0.0
    num_done = 0
    cpu = time.process_time()
    began = last_told = time.perf_counter() if start is None else start

    async def one(index: int) -> None:
        nonlocal num_done, last_told, max_lag
        payload = head + b"%d\r\n\r\n" % len(job.bodies[index]) + job.bodies[index]
        if gate is None:
            max_lag = max(max_lag, time.perf_counter() - began - job.times[index])
            await client.send(payload, records[index])
        else:
            async with gate:
                await client.send(payload, records[index])
        num_done += 1
        now = time.perf_counter()
        if job.show_progress and now - last_told > 2.0:
            last_told = now
            print(f"requests: {num_done} of {len(records)} ({now - began:.0f} s)", file=sys.stderr, flush=True)

    tasks: list[asyncio.Task[None]] = []
    for index, at in enumerate(job.times):
        while (wait := began + at - time.perf_counter()) > 0:  # a timer of whole milliseconds may fire early
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    await asyncio.gather(*tasks)
    cpu_share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - began)
    client.close()
    return LoadResult(records, began, cpu_share, max_lag)


def _run_processes(job: LoadJob, num_clients: int) -> LoadResult:
    """Requests are dealt out in turn; the clock is the machine's, so that all start at one moment."""
    with ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        for index in range(num_clients):
            child = start_child("quire.benchmarks.load:main", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(child)  # closes its pipes and waits for it
            stack.callback(child.kill)
            children.append(child)
            share = msgspec.structs.replace(
                job,
                bodies=job.bodies[index::num_clients],
                times=job.times[index::num_clients],
                max_concurrency=len(range(index, job.max_concurrency, num_clients)),
                show_progress=False,
            )
            write_child(child, msgspec.msgpack.encode(share))
        for child in children:
            read_child(child)  # it says that it is ready
        began = time.perf_counter() + START_DELAY_S
        for child in children:
            write_child(child, msgspec.msgpack.encode(began))
        results = [msgspec.msgpack.decode(read_child(child), type=LoadResult) for child in children]
    records = [RequestRecord() for _ in job.bodies]
    for index, result in enumerate(results):
        records[index::num_clients] = result.records
    cpu_share, max_lag = max(result.cpu_share for result in results), max(result.max_lag_s for result in results)
    return LoadResult(records, began, cpu_share, max_lag)


def write_child(child: "subprocess.Popen[bytes]", message: bytes) -> None:
    """One message to a client process. Raises EngineError: it has ended."""
    assert child.stdin is not None
    try:
        write_message(child.stdin.fileno(), message)
    except BrokenPipeError:
        raise EngineError(f"A client process ended with code {child.wait()}.") from None


def read_child(child: "subprocess.Popen[bytes]") -> bytes:
    """A client process's next message. Raises EngineError: it has ended."""
    assert child.stdout is not None
    message = read_message(child.stdout.fileno())
    if message is None:
        raise EngineError(f"A client process ended with code {child.wait()}.")
    return message


def main(arguments: list[str]) -> int:
    """One client process: job in, "ready" out, start in, result out."""
    del arguments
    with contextlib.suppress(KeyboardInterrupt):  # the parent tells of it
        work = read_message(0)
        if work is None:
            return 1
        job = msgspec.msgpack.decode(work, type=LoadJob)
        write_message(1, b"ready")
        start = read_message(0)
        if start is None:
            return 1
        write_message(1, msgspec.msgpack.encode(_run_here(job, msgspec.msgpack.decode(start, type=float))))
    return 0
