"""`python -m bench frontend`: what the server adds to the engine: processor time of a streamed token, of a request, and latency.

The real server runs over a device with a clock (`steady.py`), its core in a process of its own, as on a GPU; a
load generator that costs little reads the streams. Processor time is the kernel's own count of each process's threads. The
parts of a token are measured besides, without sockets; what is left of the whole is the connection's: the kernel's sending
and the event loop's.
"""

import argparse
import contextlib
import dataclasses
import glob
import itertools
import json
import re
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.frontend_server import engine_config, write_tokenizer
from bench.steady import FIRST_TOKEN, NUM_MARKS, open_clock

from quire.benchmarks import common
from quire.benchmarks.own_server import started
from quire.engine.arg_parser import flag
from quire.errors import EngineError

_MARK = re.compile(rb" s(\d{4})")
_END = b"0\r\n\r\n"


@dataclasses.dataclass
class LoadResult:
    """What was seen; times in seconds.

    Attributes:
        added: of each read that carried tokens: from the end of the newest one's step to its arrival.
        first: of each request: from sending to its first token.
        tokens: all tokens that came.
        failed: answers that were not a complete stream, as they began.
    """

    added: list[float] = dataclasses.field(default_factory=list[float])
    first: list[float] = dataclasses.field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0
    failed: list[bytes] = dataclasses.field(default_factory=list[bytes])


class _Stream:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.sent = 0.0
        self.tokens = 0
        self.head = b""
        self.tail = b""


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A POST as bytes; the connection is closed after the answer."""
    payload = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


def run_load(port: int, requests: Sequence[bytes], gaps: Sequence[float], clock: npt.NDArray[np.float64]) -> LoadResult:
    """Send each request after its gap (seconds since the one before it) and read every answer to its end."""
    result = LoadResult()
    selector = selectors.DefaultSelector()
    streams = [_Stream(port) for _ in requests]
    waiting = list(zip(streams, requests, np.cumsum(gaps).tolist(), strict=True))[::-1]
    open_streams = len(streams)
    began = time.monotonic()
    while open_streams:
        while waiting and waiting[-1][2] <= time.monotonic() - began:
            stream, data, _ = waiting.pop()
            stream.sent = time.monotonic()
            stream.socket.setblocking(True)
            stream.socket.sendall(data)
            stream.socket.setblocking(False)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        timeout = max(0.0, waiting[-1][2] - (time.monotonic() - began)) if waiting else 10.0
        for key, _ in selector.select(timeout):
            if not _read(key.data, result, clock):
                selector.unregister(key.data.socket)
                key.data.socket.close()
                open_streams -= 1
    result.seconds = time.monotonic() - began
    return result


def _read(stream: _Stream, result: LoadResult, clock: npt.NDArray[np.float64]) -> bool:
    """Take in what has come; false at the end."""
    data = stream.socket.recv(1 << 16)
    now = time.monotonic()
    if not data:
        if not stream.tail.endswith(_END):
            result.failed.append(stream.head[:500])
        return False
    marks = _MARK.findall(data)
    if marks:
        if not stream.tokens:
            result.first.append(now - stream.sent)
        stream.tokens += len(marks)
        result.tokens += len(marks)
        result.added.append(now - clock[int(marks[-1])])
    stream.head = stream.head or data
    stream.tail = data[-16:] if len(data) >= 16 else (stream.tail + data)[-16:]
    return True


PARTS = ("core: encode", "wire: decode", "keep tokens", "make text", "make chunk")
STEPS = 300
COMPLETIONS = "/v1/completions"
OTHERS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--streams", 256, "requests at once")
    flag(parser, "--input-len", 512, "tokens a prompt")
    flag(parser, "--output-len", 400, "tokens an answer")
    flag(parser, "--step-ms", 10.0, "a step of the device, milliseconds")


@contextlib.contextmanager
def _server(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """A server's port, its process id and its core's."""
    words = [str(folder), json.dumps(settings)]
    with started("bench.frontend_server", words, "frontend at port ") as (line, process):
        (core,) = _children(process.pid)
        yield int(line.split()[-1]), process.pid, core


def _children(pid: int) -> list[int]:
    paths = glob.glob(f"/proc/{pid}/task/*/children")
    return [int(child) for path in paths for child in Path(path).read_text().split()]


def _cpu_us(pid: int) -> float:
    """Processor time of a process's living threads, in microseconds."""
    total = 0.0
    for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(Path(path).read_text().split()[0]) / 1000
    return total


def _requests(count: int, input_len: int, output_len: int, path: str = COMPLETIONS) -> list[bytes]:
    """Requests with prompts of `input_len` tokens: ids for completions, text for others (here a token a character)."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fixed = {"model": "steady", limit: output_len, "temperature": 0, "stream": True}
    if path == COMPLETIONS:
        draw = np.random.default_rng(0).integers(FIRST_TOKEN, FIRST_TOKEN + NUM_MARKS, (count, input_len)).tolist()
        return [request_bytes(path, {"prompt": prompt, "ignore_eos": True, **fixed}) for prompt in draw]
    texts = [f"{number} ".ljust(input_len, "x") for number in range(count)]
    if path == "/v1/responses":
        return [request_bytes(path, {"input": text, "store": False, **fixed}) for text in texts]
    return [request_bytes(path, {"messages": [{"role": "user", "content": text}], **fixed}) for text in texts]


def measure_server(args: argparse.Namespace) -> dict[str, Any]:
    """Runs over the real server: a burst of requests for two tokens, a burst of long ones, and arrivals spread out so that
    about half as many run at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tokenizer(Path(name))
        clock = open_clock(f"{name}/clock", create=True)
        with _server(folder, {"step_ms": args.step_ms, "clock_file": f"{name}/clock"}) as (port, frontend, core):

            def run(output_len: int, gap_s: float = 0.0, path: str = COMPLETIONS) -> tuple[LoadResult, float, float]:
                before = _cpu_us(frontend), _cpu_us(core)
                requests = _requests(args.streams, args.input_len, output_len, path)
                gaps = (
                    np.random.default_rng(1).exponential(gap_s, args.streams).tolist()
                    if gap_s
                    else [0.0] * len(requests)
                )
                result = run_load(port, requests, gaps, clock)
                if result.failed:
                    raise EngineError(f"{len(result.failed)} streams failed; the first began {result.failed[0]!r}")
                return result, _cpu_us(frontend) - before[0], _cpu_us(core) - before[1]

            run(8)
            short, short_us, _ = run(2)
            long, long_us, core_us = run(args.output_len)
            spread, _, _ = run(args.output_len, 2 * args.output_len * args.step_ms / 1e3 / args.streams)
            others: dict[str, float] = {}
            for path in OTHERS:
                (_, few_us, _), (_, many_us, _) = run(2, path=path), run(args.output_len // 2, path=path)
                others[path] = (many_us - few_us) / args.streams / (args.output_len // 2 - 2)
    more = long.tokens - short.tokens
    return {
        "token_us": (long_us - short_us) / more,
        "tokens_per_read": long.tokens / len(long.added),
        "other_token_us": others,
        "request_us": short_us / args.streams,
        "core_token_us": core_us / long.tokens,
        "core_step_ms": core_us / args.output_len / 1e3,
        "output_tokens_per_second": long.tokens / long.seconds,
        "device_tokens_per_second": args.streams / args.step_ms * 1e3,
        "burst_added_ms": common.summary([seconds * 1e3 for seconds in long.added]),
        "burst_ttft_ms": common.summary([seconds * 1e3 for seconds in short.first]),
        "half_load_added_ms": common.summary([seconds * 1e3 for seconds in spread.added]),
    }


def measure_parts(num_streams: int) -> dict[str, float]:
    """Microseconds a token of each part before the socket, for a step in which every stream gets a token."""
    from quire.codec import encode
    from quire.engine.input_processor import InputProcessor
    from quire.engine.messages import Outputs, decoder_at_frontend
    from quire.engine.output_processor import OutputProcessor
    from quire.engine.tokenizer_source import TokenizerSource
    from quire.entrypoints.openai.chunks import COMPLETION_TEXT, ChunkWriter
    from quire.metrics.engine_metrics import EngineMetrics
    from quire.request import EngineCoreOutputs
    from quire.sampling_params import RequestOutputKind, SamplingParams

    with tempfile.TemporaryDirectory() as name:
        config = engine_config(write_tokenizer(Path(name)), {})
        inputs = InputProcessor(config, TokenizerSource(config.model))
        processor = OutputProcessor([EngineMetrics("steady", config.model.max_model_len)])
        params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        prompt = inputs.tokenize([FIRST_TOKEN] * 16)
        records = [inputs.process(f"cmpl-{number:032x}-1", prompt, params) for number in range(num_streams)]
    for record in records:
        processor.add(record)
    ids = [record.engine_requests[0].request_id for record in records]
    sequences = [record.sequences[0] for record in records]
    fields = {"object": "text_completion", "created": 1, "model": "steady"}
    writers = [ChunkWriter({"id": record.request_id, **fields}, COMPLETION_TEXT, False) for record in records]
    decode, clock = decoder_at_frontend(), time.process_time
    seconds = dict.fromkeys(PARTS, 0.0)

    def step(number: int) -> None:
        times = [clock()]
        message = Outputs(EngineCoreOutputs(plain_ids=ids, plain_tokens=[FIRST_TOKEN + number] * num_streams))
        data = encode(message)
        times.append(clock())
        outputs = decode(data)
        assert isinstance(outputs, Outputs)
        times.append(clock())
        touched, _ = processor.process(outputs.outputs, time.monotonic())
        times.append(clock())
        if not number:
            for record in touched:
                record.build_output()
            return
        news = [sequence.take_text() for sequence in sequences]
        times.append(clock())
        for writer, new in zip(writers, news, strict=True):
            assert new is not None
            writer.text(0, new)
        times.append(clock())
        for part, (start, end) in zip(PARTS, itertools.pairwise(times), strict=True):
            seconds[part] += end - start

    for number in range(STEPS + 1):
        step(number)
    return {part: value * 1e6 / STEPS / num_streams for part, value in seconds.items()}


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    parts, whole = measure_parts(args.streams), measure_server(args)
    rest = whole["token_us"] - sum(parts[part] for part in PARTS[1:])
    rows = [(part, value) for part, value in parts.items()]
    rows += [("connection (the rest)", rest), ("frontend, all of it", whole["token_us"])]
    rows += [(f"all of it, {path}", value) for path, value in whole["other_token_us"].items()]
    common.print_table(f"Processor time of a streamed token, µs ({args.streams} streams)", rows)
    figures = [
        ("a request, from its bytes to its end, with 2 tokens: frontend, µs", whole["request_us"]),
        ("core process: a step, ms", whole["core_step_ms"]),
        ("tokens in what a client reads at once", whole["tokens_per_read"]),
        ("output tokens/s", whole["output_tokens_per_second"]),
        ("of what the device gives", whole["output_tokens_per_second"] / whole["device_tokens_per_second"]),
    ]
    common.print_table("The server", figures)
    latencies = {
        "token, at half load": whole["half_load_added_ms"],
        "token, all at once": whole["burst_added_ms"],
        "first token of a burst": whole["burst_ttft_ms"],
    }
    title = "From the step's end to the client, ms (the last: from sending)"
    common.print_summaries(title, latencies, ("mean", "p50", "p90", "p99"))
    return {"streams": args.streams, "step_ms": args.step_ms, "parts_us": parts, **whole, "machine": common.machine()}
