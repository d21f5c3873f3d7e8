"""A server that is asked for more than it can do, in three parts.

`flood`: requests come at many times the rate at which the server answers. Counts what was accepted and what became of it, times
the refusals, and watches the server's memory and its return to normal. The flood's own client is busy, so refusals are timed
beside it, by `light_client.py`, and in the server (its histogram, from a request's head to its answer's end).
`tenants`: one tenant floods a server that shares by turns; the time to first token of another one (`light_client.py`), alone and
beside it.
`neighbours`: the time between tokens of streams beside which long prompts arrive, and what short steps cost in throughput.

    python -m bench overload --json bench/results/overload.json
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.light_client import WORDS

from quire.benchmarks import common
from quire.benchmarks.own_server import started
from quire.entrypoints.http_client import Target, ask

PARTS = ("flood", "tenants", "neighbours")


@dataclasses.dataclass
class Answer:
    """One request as its client saw it. Seconds since it was sent; `times`: when each piece of a stream came."""

    status: int
    first_byte: float
    times: list[float]
    num_tokens: int = 0
    is_whole: bool = False
    retry_after: str = ""


class Client:
    """Sends completions over connections that are used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str, max_tokens: int, headers: str = "") -> Answer:
        """A streamed completion of exactly so many tokens, or the refusal."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}  # an event for each token
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode()
        reader, writer = await self._connect()
        began = time.perf_counter()
        writer.write(head + data)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        answer = Answer(int(answer_head[9:12]), time.perf_counter() - began, [])
        fields = dict(line.split(": ", 1) for line in answer_head.decode().lower().split("\r\n")[1:] if line)
        if answer.status != 200:
            answer.retry_after = fields.get("retry-after", "")
            await reader.readexactly(int(fields["content-length"]))
        else:
            await self._read_stream(reader, answer, began)
        self._idle.append((time.perf_counter(), reader, writer))
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that was used a moment ago, or a new one: servers close those that are idle for long."""
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.perf_counter() - since < 1.0:
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _read_stream(self, reader: asyncio.StreamReader, answer: Answer, began: float) -> None:
        """Chunks of a body until its end."""
        while size := int(await reader.readline(), 16):
            data = await reader.readexactly(size + 2)
            answer.times.append(time.perf_counter() - began)
            if b'"completion_tokens":' in data:
                answer.num_tokens = int(data.rsplit(b'"completion_tokens":', 1)[1].split(b",")[0].split(b"}")[0])
            answer.is_whole |= b"data: [DONE]" in data
        await reader.readline()

    def close(self) -> None:
        for _, _, writer in self._idle:
            writer.close()


def prompt_of(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))


@contextlib.contextmanager
def server(args: argparse.Namespace, *words: str) -> Iterator[tuple[int, int]]:
    """A server of the demo model: its port and its process."""
    given = ["serve", "--port", "0", "--disable-uvicorn-access-log", "--max-num-seqs", str(args.max_num_seqs)]
    given += ["--kv-cache-memory-bytes", "256M", *(["--model", args.model] if args.model else []), *words]
    with started("quire.entrypoints.cli.main", given, " is ready after ") as (line, process):
        yield int(line.rsplit(":", 1)[1]), process.pid


def processes_of(session: int) -> list[Path]:
    """The folders in /proc of the processes that a server started."""
    found: list[Path] = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session:
                found.append(folder)
    return found


def resident_mib(processes: Sequence[Path]) -> float:
    """Memory of these processes, MiB."""
    pages = 0
    for folder in processes:
        with contextlib.suppress(OSError):
            pages += int((folder / "statm").read_text().split()[1])
    return pages * 4096 / 2**20


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    found = {name: round(1e3 * common.percentile(values, share), 2) for name, share in (("p50", 50), ("p99", 99))}
    return found | {"max": round(1e3 * max(values), 2), "count": len(values)}


async def light_client(*words: object) -> asyncio.subprocess.Process:
    """`light_client.py` in a process of its own."""
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.light_client", *map(str, words), **pipes)


async def seconds_of(process: asyncio.subprocess.Process) -> list[float]:
    """What it has timed; ends its input. Raises RuntimeError: it failed."""
    told, _ = await process.communicate(b"")  # without an argument, Python 3.11 leaves the pipe open
    if process.returncode:
        raise RuntimeError(f"the light client ended with code {process.returncode}")
    return json.loads(told)


def durations(port: int) -> dict[str, float]:
    """The server's histogram of completions: how many took at most so many seconds."""
    text = ask(Target("127.0.0.1", port), "GET", "/metrics")[1].decode()
    mark = "http_request_duration_seconds_bucket{"
    rows = [line for line in text.splitlines() if line.startswith(mark) and '"/v1/completions"' in line]
    return {row.split('le="')[1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in rows}


# --- flood ---


async def capacity(client: Client, args: argparse.Namespace, draw: random.Random) -> float:
    """Requests a second that the server ends while it is full."""
    count = 4 * args.max_num_seqs
    began = time.perf_counter()
    await asyncio.gather(*(client.ask(prompt_of(draw, args.words), args.tokens) for _ in range(count)))
    return count / (time.perf_counter() - began)


async def probe(client: Client, args: argparse.Namespace, draw: random.Random) -> float | None:
    """Seconds to the first token of a short request; None if it was refused."""
    answer = await client.ask(prompt_of(draw, 4), 2)
    return answer.times[0] if answer.times else None


async def flood(args: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    client, draw = Client(port), random.Random(1)
    await capacity(client, args, draw)  # what is made once is made here
    rate = await capacity(client, args, draw)
    calm = max([await probe(client, args, draw) or 0.0 for _ in range(5)])
    processes = processes_of(pid)  # to walk through /proc takes too long while answers are timed
    memory = [resident_mib(processes)]

    async def watch() -> None:
        while True:
            memory.append(resident_mib(processes))
            await asyncio.sleep(0.2)

    watcher = asyncio.ensure_future(watch())
    light, before = await light_client("refusals", port), durations(port)
    began, tasks = time.perf_counter(), list[asyncio.Task[Answer]]()
    for number in range(args.requests):
        await asyncio.sleep(max(0.0, began + number / (args.factor * rate) - time.perf_counter()))
        tasks.append(asyncio.ensure_future(client.ask(prompt_of(draw, args.words), args.tokens)))
    sending_s = time.perf_counter() - began
    light_waits = await seconds_of(light)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    last_answer = time.perf_counter()
    while (found := await probe(client, args, draw)) is None or found > 2 * calm + 0.01:
        await asyncio.sleep(0.01)
    recovery_s = time.perf_counter() - last_answer
    watcher.cancel()
    client.close()
    within = {bound: count - before.get(bound, 0.0) for bound, count in durations(port).items()}
    good = [one for one in answers if isinstance(one, Answer)]
    accepted = [one for one in good if one.status == 200]
    refused = [one for one in good if one.status == 429]
    lost = [one for one in accepted if not one.is_whole or one.num_tokens != args.tokens]
    return {
        "capacity_requests_per_s": round(rate, 1),
        "requests": args.requests,
        "times_capacity": round(args.requests / sending_s / rate, 1),
        "accepted": len(accepted),
        "accepted_and_lost": len(lost),
        "refused": len(refused),
        "neither": args.requests - len(accepted) - len(refused),
        "refusals_without_retry_after": sum(not one.retry_after for one in refused),
        "refusal_ms": milliseconds([one.first_byte for one in refused]) if refused else None,
        "refusal_ms_light_client": milliseconds(light_waits) if light_waits else None,
        "answered_by_the_server_within_s": within,
        "recovery_s": round(recovery_s, 3),
        "memory_mib": {"before": round(memory[0]), "most": round(max(memory)), "after": round(resident_mib(processes))},
    }


# --- tenants ---


async def tenants(args: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    del pid
    client, draw = Client(port), random.Random(2)
    await capacity(client, args, draw)
    quiet = ("first-tokens", port, args.quiet_requests, args.words)
    alone = await seconds_of(await light_client(*quiet))
    ended = 0

    async def flooding() -> None:
        nonlocal ended
        while True:
            answer = await client.ask(prompt_of(draw, args.words), args.tokens, "X-Tenant: flood\r\n")
            ended += answer.status == 200
            await asyncio.sleep(0 if answer.status == 200 else 0.2)

    flood_tasks = [asyncio.ensure_future(flooding()) for _ in range(8 * args.max_num_seqs)]
    await asyncio.sleep(2.0)
    began, ended = time.perf_counter(), 0
    beside = await seconds_of(await light_client(*quiet))
    rate = ended / (time.perf_counter() - began)
    for task in flood_tasks:
        task.cancel()
    await asyncio.gather(*flood_tasks, return_exceptions=True)
    ratio = common.percentile(beside, 99) / common.percentile(alone, 99)
    return {
        "ttft_alone_ms": milliseconds(alone),
        "ttft_beside_a_flood_ms": milliseconds(beside),
        "p99_ratio": round(ratio, 2),
        "flood_requests_per_s": round(rate, 1),
    }


# --- neighbours ---


def gaps(answers: Sequence[Answer]) -> list[float]:
    """Seconds between the pieces of streams."""
    return [after - before for one in answers for before, after in zip(one.times[2:], one.times[3:], strict=False)]


async def neighbours(args: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    del pid
    client, draw = Client(port), random.Random(3)
    await capacity(client, args, draw)
    streams = [client.ask(prompt_of(draw, 8), args.stream_tokens) for _ in range(args.streams)]
    alone = gaps(await asyncio.gather(*streams))
    ttfts: list[float] = []

    async def long_prompts() -> None:
        while True:
            ttfts.append((await client.ask(prompt_of(draw, args.long_words), 1)).times[0])
            await asyncio.sleep(0.05)

    task = asyncio.ensure_future(long_prompts())
    streams = [client.ask(prompt_of(draw, 8), args.stream_tokens) for _ in range(args.streams)]
    beside = gaps(await asyncio.gather(*streams))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    began = time.perf_counter()
    mixed = [client.ask(prompt_of(draw, 20 * args.words), args.tokens) for _ in range(8 * args.max_num_seqs)]
    await asyncio.gather(*mixed)
    return {
        "gap_alone_ms": milliseconds(alone),
        "gap_beside_long_prompts_ms": milliseconds(beside),
        "p99_ratio": round(common.percentile(beside, 99) / common.percentile(alone, 50), 2),
        "long_prompt_ttft_ms": milliseconds(ttfts),
        "saturated_requests_per_s": round(len(mixed) / (time.perf_counter() - began), 2),
    }


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="", help="a model in place of the demo model")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-waiting", type=int, default=64)
    parser.add_argument("--words", type=int, default=12, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=5000, help="of the flood")
    parser.add_argument("--factor", type=float, default=50.0, help="the flood's rate over the server's")
    parser.add_argument("--quiet-requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--long-words", type=int, default=800)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts; each has servers of its own."""
    plans = {
        "flood": (flood, {"": ["--max-num-waiting", str(args.max_num_waiting)]}),
        "tenants": (tenants, {"": ["--scheduling-policy", "fair", "--tenant-header", "X-Tenant"]}),
        "neighbours": (neighbours, {"auto": ["--max-step-ms", "auto"], "off": ["--max-step-ms", "0"]}),
    }
    results: dict[str, Any] = {}
    for part in args.parts:
        measure, servers = plans[part]
        for name, words in servers.items():
            with server(args, *words) as (port, pid):
                found = asyncio.run(measure(args, port, pid))
            results.setdefault(part, {}).update({name: found} if name else found)
            print(f"{part} {name}".strip(), json.dumps(found, indent=1), flush=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "parts", "model")}
    return {"settings": settings, "machine": common.machine(), **results}
