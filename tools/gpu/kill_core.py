"""`kill -9` of a server's core under many streams: when every stream moves again, where the time goes, and what was lost.

Starts `quire serve`, runs the streams once undisturbed, then as often as asked with a kill in their middle, and compares the
tokens: `python tools/gpu/kill_core.py --streams 256 --serve "--model MODEL --load-format dummy"`. Half of the streams are sampled
with a seed, half are greedy. Random weights give nearly flat logits, so that a seeded token hangs on its position and seed: one
that is lost or repeated shows at once. A greedy token may differ where a step has other neighbours, unless the server has
`--deterministic`. Prints a table, writes JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.descriptors import raise_limit
from quire.entrypoints.http_client import Target
from quire.processes import family

_CORE, _WARMING, _SPARE = "quire core", "quire warming", "quire spare"
_PATIENCE_S = 120.0
_MARKS = {
    "noticed": "the engine core died and is started again",
    "core started": "] start: ",
    "core ready": "a new engine core is ready after",
}


class Server:
    """A `quire serve`, and what it says, with the moment of each line."""

    def __init__(self, words: list[str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._is_ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        began = time.perf_counter()
        if not self._is_ready.wait(_PATIENCE_S) or self.process.poll() is not None:
            raise SystemExit("the server did not start:\n" + "\n".join(line for _, line in self.lines[-30:]))
        self.start_s = time.perf_counter() - began
        ready = next(line for _, line in self.lines if " is ready after " in line)
        self.target = Target.parse(ready.rsplit(" at ", 1)[1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.perf_counter(), line.rstrip()))
            if " is ready after " in line:
                self._is_ready.set()
        self._is_ready.set()

    def core_pid(self) -> int:
        """The process of the core that runs now."""
        pid = self._find(_CORE)
        if pid is None:
            raise SystemExit("the server has no core process")
        return pid

    def spare(self) -> dict[str, Any] | None:
        """The process that waits to become the next core, once it has imported everything: what it costs. None: there is none."""
        while (pid := self._find(_SPARE)) is None:
            if self._find(_WARMING) is None:
                return None
            time.sleep(0.1)
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        mib = {name: int(fields[name].split()[0]) // 1024 for name in ("Rss", "Pss", "Private_Dirty")}
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
        apps = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        devices = [link for file in Path(f"/proc/{pid}/fd").iterdir() if "/dev/nvidia" in (link := os.readlink(file))]
        holds = any(line.split(",")[0].strip() == str(pid) for line in apps.splitlines())
        return {"host_mib": mib, "has_gpu_memory": holds, "open_gpu_devices": devices}

    def _find(self, name: str) -> int | None:
        return next((state.pid for state in family(self.process.pid) if state.name == name), None)

    def since(self, begin: float) -> list[tuple[float, str]]:
        return [(at, line) for at, line in self.lines if at >= begin]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Answer(NamedTuple):
    """One stream: its tokens, when each event came, and what went wrong."""

    tokens: list[int]
    times: list[float]
    finish_reason: str
    error: str


class Stream(asyncio.Protocol):
    """Keeps what comes with its moments; it is read when all is over."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._transport: asyncio.Transport | None = None
        self.began = 0.0
        self.chunks: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, target: Target, body: dict[str, Any]) -> "Stream":
        """Send a request."""
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        stream = cls(head.encode() + data)
        await asyncio.get_running_loop().create_connection(lambda: stream, target.host, target.port)
        return stream

    def close(self) -> None:
        """Have no more of it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.began = time.perf_counter()
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def answer(self) -> Answer:
        tokens: list[int] = []
        times: list[float] = []
        finish, error, rest = "", "", b""
        for at, data in self.chunks:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = str(event["error"])
                for choice in event.get("choices", ()):
                    new = choice.get("token_ids") or []
                    tokens += new
                    times += [at] * len(new)
                    finish = choice.get("finish_reason") or finish
        if not tokens and not error:
            error = b"".join(data for _, data in self.chunks)[:300].decode(errors="replace")
        return Answer(tokens, times, finish, error)


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every second one is greedy."""
    source = random.Random(1)
    return [
        {
            "prompt": [source.randrange(10, args.most_id) for _ in range(args.input_len)],
            "max_tokens": args.output_len,
            "ignore_eos": True,
            **({"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}),
            "stream": True,
            "return_token_ids": True,
        }
        for index in range(args.streams)
    ]


async def run_streams(
    server: Server, requests: list[dict[str, Any]], kill_after: int | None
) -> tuple[list[Answer], float]:
    """All of them at once, with a kill so many events of each stream later; the answers, and when the core was killed."""
    streams = [await Stream.open(server.target, body) for body in requests]
    killed = 0.0
    if kill_after is not None:
        pid = server.core_pid()
        while min(len(stream.chunks) for stream in streams) < kill_after:
            await asyncio.sleep(0.005)
            if all(stream.done.done() for stream in streams):
                raise SystemExit("all streams ended before the kill; give a longer --output-len")
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
    await asyncio.wait([stream.done for stream in streams], timeout=_PATIENCE_S)
    answers = [
        stream.answer() if stream.done.done() else stream.answer()._replace(error="no end") for stream in streams
    ]
    return answers, killed


def compare(answers: list[Answer], oracle: list[Answer], greedy: bool) -> dict[str, Any]:
    """What differs from the undisturbed run, of the greedy streams or of the others."""
    pairs = [pair for index, pair in enumerate(zip(answers, oracle, strict=True)) if (index % 2 == 1) == greedy]
    equal = sum(a.tokens == b.tokens for a, b in pairs)
    firsts = [
        next(
            (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y),
            min(len(a.tokens), len(b.tokens)),
        )
        for a, b in pairs
        if a.tokens != b.tokens
    ]
    return {
        "streams": len(pairs),
        "equal": equal,
        "other_length": sum(len(a.tokens) != len(b.tokens) for a, b in pairs),
        "shifted": sum(_is_shifted(a.tokens, b.tokens) for a, b in pairs),
        "first_difference": sorted(firsts),
    }


def _is_shifted(tokens: list[int], expected: list[int]) -> bool:
    """Whether they go on like the oracle's, one to four tokens earlier or later: some were lost or repeated."""
    start = next((i for i, (x, y) in enumerate(zip(tokens, expected, strict=False)) if x != y), None)
    if start is None:
        return False
    for by in (-4, -3, -2, -1, 1, 2, 3, 4):
        tail = expected[start + by : start + by + 16] if start + by >= 0 else []
        if len(tail) >= 8 and tokens[start : start + len(tail)] == tail and len(set(tail)) > 4:
            return True
    return False


def longest_pause(answer: Answer, killed: float) -> tuple[float, float] | None:
    """The longest time without a token that ended after the kill, and its end. (A few tokens were on their way then.)"""
    pauses = [(b - a, b) for a, b in zip(answer.times, answer.times[1:], strict=False) if b > killed]
    return max(pauses, default=None)


def judge(server: Server, answers: list[Answer], oracle: list[Answer], killed: float) -> dict[str, Any]:
    """When streams moved again, and what came out."""
    pauses = [pause for one in answers if (pause := longest_pause(one, killed)) is not None]
    moved = sorted(end - killed for _, end in pauses) or [float("nan")]
    log = server.since(killed)
    report: dict[str, Any] = {
        "streams": len(answers),
        "moved_again": len(pauses),
        "errors": [one.error for one in answers if one.error][:3],
        "tokens_before_kill": sum(sum(t <= killed for t in one.times) for one in answers),
        "first_moves_s": moved[0],
        "median_moves_s": statistics.median(moved),
        "all_move_s": moved[-1],
        "longest_gap_s": max((seconds for seconds, _ in pauses), default=0.0),
        "seeded": compare(answers, oracle, False),
        "greedy": compare(answers, oracle, True),
    }
    for name, mark in _MARKS.items():
        report[f"{name}_s"] = next((at - killed for at, line in log if mark in line), None)
    report["start"] = next((line.split("start: ", 1)[1] for _, line in log if "start: " in line), "")
    report["log"] = [f"{at - killed:7.3f} {line[:300]}" for at, line in log[:60]]
    return report


def one_server(args: argparse.Namespace, words: list[str], num_kills: int) -> Iterator[dict[str, Any]]:
    server = Server(words)
    try:
        requests = bodies(args)
        answers, _ = asyncio.run(run_streams(server, requests, None))  # for warmth: sizes are captured
        oracle, _ = asyncio.run(run_streams(server, requests, None))
        same = sum(a.tokens == b.tokens for a, b in zip(answers, oracle, strict=True))
        steps = [b - a for one in oracle for a, b in zip(one.times, one.times[1:], strict=False)]
        yield {
            "serve": words,
            "start_s": server.start_s,
            "start": next((line.split("start: ", 1)[1] for _, line in server.lines if "start: " in line), ""),
            "undisturbed": {
                "errors": [one.error for one in oracle if one.error][:3],
                "equal_in_two_runs": same,
                "median_tpot_ms": 1e3 * statistics.median(steps) if steps else None,
                "seconds": max((one.times[-1] for one in oracle if one.times), default=0.0)
                - min((one.times[0] for one in oracle if one.times), default=0.0),
            },
        }
        for number in range(num_kills):
            at = args.output_len * (number + 1) // (num_kills + 2)
            spare = server.spare()
            answers, killed = asyncio.run(run_streams(server, requests, at))
            yield judge(server, answers, oracle, killed) | {"killed_after_tokens": at, "spare": spare}
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="append", required=True, help="flags of a server; each has its turn")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--kills", type=int, nargs="+", default=[3], help="of each server")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=768)
    parser.add_argument("--most-id", type=int, default=150_000, help="prompts have token ids below this")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    raise_limit(args.streams + 200)
    report: list[dict[str, Any]] = []
    for number, text in enumerate(args.serve):
        kills: list[dict[str, Any]] = []
        try:
            for result in one_server(args, shlex.split(text), args.kills[min(number, len(args.kills) - 1)]):
                if "serve" in result:
                    report.append(result | {"kills": kills})
                    print(
                        f"{text}\n  started in {result['start_s']:.1f} s: {result['start']}\n  {result['undisturbed']}",
                        flush=True,
                    )
                else:
                    kills.append(result)
                    show(result)
                Path(args.json).write_text(json.dumps(report, indent=1))
        except (Exception, SystemExit) as error:  # the next server has its turn
            print(f"{text}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)


def show(result: dict[str, Any]) -> None:
    times = ", ".join(
        f"{name.replace('_', ' ')} {result[name]:.2f}"
        for name in ("noticed_s", "core ready_s", "first_moves_s", "median_moves_s", "all_move_s", "longest_gap_s")
        if result.get(name) is not None
    )
    print(
        f"  kill after {result['killed_after_tokens']}: {times}; {result['moved_again']} of {result['streams']} moved; "
        f"errors {result['errors']}\n    {result['start']}"
    )
    for kind in ("seeded", "greedy"):
        found = result[kind]
        print(
            f"    {kind}: {found['equal']} of {found['streams']} equal, other length {found['other_length']}, shifted "
            f"{found['shifted']}, first differences at {found['first_difference'][:6]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
