#!/usr/bin/env python3
"""Measure the resident memory of `quire serve` over many mixed requests.

The real server runs the demo model (or `--model`). Requests are of every kind that a text server gets: completions and chats,
streamed and not, with logprobs, tools, JSON schemas, stop strings, sampling parameters; the other protocols; refused ones; and
clients that go away. Each asks for 1 to 4 tokens. The memory of the server's processes is read from /proc again and again.

    python bench/server_memory.py --requests 100000 --json bench/results/server-memory.json
"""

import argparse
import asyncio
import json
import os
import random
import resource
import time
from pathlib import Path

from quire.benchmarks import common
from quire.benchmarks.own_server import started

WORDS = (
    *("apple", "river", "stone", "seven", "blue", "house", "twelve", "paper", "window"),
    *("green", "night", "garden", "silver", "ocean", "train", "cloud", "letter"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count)) + f" {draw.randrange(10**6)}"


def schema(draw: random.Random) -> dict:
    """One of some thousand schemas, so that whatever keeps them has to let go of some."""
    names = draw.sample(WORDS, 2)
    properties = {names[0]: {"type": "integer"}, names[1]: {"enum": ["yes", "no"]}}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def chat(draw: random.Random, **fields: object) -> tuple[str, dict]:
    messages = [{"role": "user", "content": text(draw, draw.randint(2, 12))}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": draw.randint(1, 4), **fields}


def completion(draw: random.Random, **fields: object) -> tuple[str, dict]:
    prompt = text(draw, draw.randint(1, 24))
    return "/v1/completions", {"prompt": prompt, "max_tokens": draw.randint(1, 4), **fields}


def form(draw: random.Random) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema(draw)}}


KINDS = {
    "completion": (20, lambda d: completion(d)),
    "completion, streamed": (16, lambda d: completion(d, stream=True)),
    "completion, sampled": (6, lambda d: completion(d, temperature=0.9, top_p=0.9, top_k=20, seed=d.randrange(9999))),
    "completion, logprobs": (4, lambda d: completion(d, logprobs=d.randint(0, 5), stream=d.random() < 0.5)),
    "completion, prompt_logprobs": (1, lambda d: completion(d, prompt_logprobs=1)),
    "completion, stop": (3, lambda d: completion(d, stop=[d.choice(WORDS), f"{d.randrange(10**6)}"])),
    "completion, bad_words": (1, lambda d: completion(d, bad_words=[f"word{d.randrange(10**6)}"])),
    "completion, n": (2, lambda d: completion(d, n=2, temperature=1.0)),
    "completion, echo": (1, lambda d: completion(d, echo=True, logprobs=1)),
    "completion, salt": (1, lambda d: completion(d, cache_salt=f"salt {d.randrange(10**9)}")),
    "chat": (14, lambda d: chat(d)),
    "chat, streamed": (14, lambda d: chat(d, stream=True, stream_options={"include_usage": True})),
    "chat, logprobs": (2, lambda d: chat(d, logprobs=True, top_logprobs=3, stream=d.random() < 0.5)),
    "chat, tools": (2, lambda d: chat(d, tools=[TOOL], tool_choice="auto", stream=d.random() < 0.5)),
    "chat, required tool": (1, lambda d: chat(d, tools=[TOOL], tool_choice="required")),
    "chat, JSON schema": (2, lambda d: chat(d, response_format=form(d), stream=d.random() < 0.5)),
    "responses": (1, lambda d: ("/v1/responses", {"input": text(d, 5), "max_output_tokens": 16})),
    "messages": (
        1,
        lambda d: ("/v1/messages", {"messages": [{"role": "user", "content": text(d, 4)}], "max_tokens": 2}),
    ),
    "refused": (2, lambda d: completion(d, temperature=-1)),
    "not JSON": (1, lambda d: ("/v1/completions", {})),
    "gone at once": (2, lambda d: completion(d, stream=True, max_tokens=64, ignore_eos=True)),
    "gone in a stream": (2, lambda d: chat(d, stream=True, max_tokens=64, ignore_eos=True)),
    "new connection": (1, lambda d: chat(d)),
}


class Load:
    """Requests of one seed, some at a time, over kept connections.

    Attributes:
        counts: answers by kind and status; `gone` where the client went away.
    """

    def __init__(self, port: int, model: str, seed: int) -> None:
        self._port, self._model = port, model
        self._draw = random.Random(seed)
        self._names = list(KINDS)
        self._weights = [weight for weight, _ in KINDS.values()]
        self.counts: dict[str, int] = {}
        self.done = 0

    async def run(self, count: int, at_once: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(self._client(left) for _ in range(at_once)))

    async def _client(self, left) -> None:
        link = None
        for _ in left:
            (name,) = self._draw.choices(self._names, self._weights)
            if link is None or name == "new connection":
                await self._close(link)
                link = await asyncio.open_connection("127.0.0.1", self._port)
            status, is_open = await self._one(name, *link)
            if not is_open:
                await self._close(link)
                link = None
            self.done += 1
            key = f"{name}: {status}"
            self.counts[key] = self.counts.get(key, 0) + 1
        await self._close(link)

    @staticmethod
    async def _close(link) -> None:
        if link is not None:
            link[1].close()

    async def _one(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool]:
        """Send one request and read its answer: the status, and whether the connection can be used again."""
        path, body = KINDS[name][1](self._draw)
        payload = b"{broken" if name == "not JSON" else json.dumps({"model": self._model, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        if name == "gone at once":
            return "gone", False
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if name == "gone in a stream":
            await reader.read(100)
            return "gone", False
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r")[0]))
        else:
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        return head.split()[1].decode(), b"connection: close" not in head


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [pid, *(below for child in children for below in tree(int(child)))]


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


async def measure(args: argparse.Namespace, port: int, pid: int) -> list[dict]:
    load = Load(port, args.model_name, args.seed)
    began, rows = time.monotonic(), []
    step = max(1, args.requests // args.samples)

    def sample() -> None:
        memory = [resident_mib(one) for one in tree(pid)]
        rows.append({"requests": load.done, "s": round(time.monotonic() - began, 1), "rss_mib": memory})
        print(f"{load.done:8} requests {rows[-1]['s']:8.1f} s  {memory} MiB", flush=True)

    sample()
    while load.done < args.requests and time.monotonic() - began < args.max_seconds:
        await load.run(min(step, args.requests - load.done), args.at_once)
        sample()
    print(json.dumps(dict(sorted(load.counts.items())), indent=1))
    rows[-1]["answers"] = dict(sorted(load.counts.items()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="what quire serve gets")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--samples", type=int, default=50, help="how often memory is read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=1500.0, help="end earlier after this")
    parser.add_argument("--serve-args", nargs="*", default=[], help="further words for quire serve")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model_name = "load"
    words = ["serve", args.model, "--served-model-name", "load", "--port", "0", "--disable-uvicorn-access-log"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *args.serve_args]
    with started("quire.entrypoints.cli.main", words, " is ready after ") as (line, process):
        port = int(line.rsplit(":", 1)[1])
        rows = asyncio.run(measure(args, port, process.pid))
    if args.json:
        figures = {
            "what": "resident memory of the processes of `quire serve` over mixed requests of 1 to 4 tokens, MiB",
            "model": args.model,
            "at_once": args.at_once,
            "serve_args": args.serve_args,
            "cores": os.cpu_count(),
            "machine": common.machine(),
            "samples": rows,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
