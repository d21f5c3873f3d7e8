#!/usr/bin/env python3
"""Measure how long a 429 takes while many clients want more than the queue holds.

`quire serve` runs the demo model with a short queue. All connections are opened first; then each sends a request in the same
moment, and again after each answer, until each has sent `--each`. The client does nothing but write prepared bytes and note when
the first byte of an answer comes.

    python bench/refusals.py --json bench/results/refusals.json
    python bench/refusals.py --trees BEFORE/src AFTER/src       # two source trees in turns
"""

import argparse
import json
import os
import select
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from quire.benchmarks import common
from quire.benchmarks.own_server import started


def request_bytes(num_chars: int) -> bytes:
    text = "the quick brown fox " * (num_chars // 20 + 1)
    body = {"model": "load", "prompt": text[:num_chars], "max_tokens": 64, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


class Burst:
    """Many connections that all ask at once.

    Attributes:
        waited: seconds from sending a request to the first byte of its answer, by status.
    """

    def __init__(self, port: int, connections: int, request: bytes) -> None:
        self._request = request
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        for _ in range(connections):
            link = socket.create_connection(("127.0.0.1", port))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
            self._sockets[link.fileno()] = link
            self._poll.register(link.fileno(), select.EPOLLIN)
        self._sent: dict[int, float] = {}
        self._left: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}
        self.waited: dict[str, list[float]] = {}

    def run(self, each: int, timeout_s: float = 60.0) -> float:
        """Seconds until all have their answers, or none came for `timeout_s`."""
        self._left = dict.fromkeys(self._sockets, each)
        began = time.perf_counter()
        for number in self._sockets:
            self._send(number)
        open_requests = len(self._sockets)
        while open_requests and (ready := self._poll.poll(timeout_s)):
            now = time.perf_counter()
            for number, _ in ready:
                open_requests -= self._read(number, now)
        seconds = time.perf_counter() - began
        for link in self._sockets.values():
            link.close()
        return seconds

    def _send(self, number: int) -> None:
        self._left[number] -= 1
        self._rest[number] = b""
        self._sent[number] = time.perf_counter()
        self._sockets[number].send(self._request)

    def _read(self, number: int, now: float) -> bool:
        """Take in what came; whether the connection has nothing more to ask."""
        data = self._sockets[number].recv(1 << 16)
        if not self._rest[number]:
            status = data[9:12].decode() or "closed"
            self.waited.setdefault(status, []).append(now - self._sent[number])
        if not data:
            self._poll.unregister(number)
            return True
        self._rest[number] += data
        head, found, body = self._rest[number].partition(b"\r\n\r\n")
        if not found:
            return False
        length = int(head.lower().split(b"content-length:")[1].split(b"\r")[0])
        if len(body) < length:
            return False
        if self._left[number]:
            self._send(number)
            return False
        self._poll.unregister(number)
        return True


def figures(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    ms = {
        name: round(1e3 * ordered[int(share * last)], 1) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
    return {"answers": len(ordered), **ms}


def measure(args: argparse.Namespace, tree: str) -> dict[str, Any]:
    words = [
        "serve",
        "--served-model-name",
        "load",
        "--port",
        "0",
        "--disable-uvicorn-access-log",
        "--max-num-seqs",
        "8",
    ]
    words += ["--max-num-waiting", str(args.max_num_waiting), "--kv-cache-memory-bytes", "64M"]
    environment = {"PYTHONPATH": os.path.abspath(tree)} if tree else {}
    with started("quire.entrypoints.cli.main", words, " is ready after ", environment) as (line, _):
        port = int(line.rsplit(":", 1)[1])
        Burst(port, 4, request_bytes(100)).run(1)  # the first requests pay for what is made once
        burst = Burst(port, args.connections, request_bytes(args.chars))
        seconds = burst.run(args.each)
    row = {"tree": tree, "seconds": round(seconds, 2)}
    row |= {status: figures(waited) for status, waited in sorted(burst.waited.items())}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1500)
    parser.add_argument("--each", type=int, default=2, help="requests of each connection")
    parser.add_argument("--chars", type=int, default=2000, help="characters of a prompt")
    parser.add_argument("--max-num-waiting", type=int, default=64)
    parser.add_argument("--trees", nargs="+", default=[""], metavar="SRC", help="source trees to compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = [measure(args, tree) for _ in range(args.rounds) for tree in args.trees]
    for tree in args.trees:
        worst = [run["429"]["max"] for run in runs if run["tree"] == tree and "429" in run]
        print(f"{tree}: the slowest 429 took {statistics.median(worst):.0f} ms (median of {len(worst)} runs)")
    if args.json:
        settings = {name: getattr(args, name) for name in ("connections", "each", "chars", "max_num_waiting")}
        report = {"what": __doc__.splitlines()[0], **settings, "machine": common.machine(), "runs": runs}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
