"""`python -m bench media`: what an image costs a server with two frontends, when it is new and when the other one had it.

First the cache alone: milliseconds of processing an image, of keeping it, and of finding it in a frontend's own memory, in files
that frontends share (where nobody uses them, and where another request has them). Then a server: the image comes to one
frontend, to the other one, and to this again. The model is tiny, so an answer takes what the image takes.
"""

import argparse
import base64
import dataclasses
import io
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.tables import print_records
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_vision import CONFIGS, make_tiny_vision

from quire.benchmarks import common

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
PIXELS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [0],
}
_MOST = 1 << 30
_ALONE = (
    "import contextlib, quire.multimodal.processor_cache as cache; "
    "cache.sharing = lambda config, _: contextlib.nullcontext(config); from quire.entrypoints.cli.main import main; main()"
)
"""Starts a server whose frontends share nothing."""


def _median_ms(times: int, call: Callable[[int], Any]) -> float:
    """Milliseconds of a call, which gets a number; the median of so many."""
    taken: list[float] = []
    for number in range(times):
        began = time.perf_counter()
        call(number)
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def measure_cache(folder: str, images: list[Any]) -> dict[str, float]:
    """What each way to an item takes, and the MB of one."""
    from quire.config import MultiModalConfig
    from quire.engine.arg_utils import EngineArgs
    from quire.kept_files import own_folder, roomiest
    from quire.multimodal.processor import MediaProcessor
    from quire.multimodal.processor_cache import cache_of

    config = EngineArgs(model=folder, max_model_len=8192).create_engine_config()
    assert config.multimodal is not None
    bare = dataclasses.replace(config.multimodal, mm_processor_cache_gb=0.0)
    processor = MediaProcessor(config.model, bare, lambda text: [ord(letter) for letter in text])
    marker = processor.markers["image"]
    items = [processor._process_all("image", [image], None, None, None)[0] for image in images]
    times = len(items)
    with own_folder(roomiest(_MOST)[0], "quire-bench-") as shared:
        own, writes, reads = (
            cache_of(MultiModalConfig(mm_processor_cache_gb=1.0, shared_cache=each))
            for each in (None, str(shared), str(shared))
        )
        for key, item in items:
            own.put(key, item)
        result = {
            "mb": items[0][1].num_bytes / 1e6,
            "process": _median_ms(times, lambda number: processor.apply([marker], {"image": images[number]})),
            "keep": _median_ms(times, lambda number: writes.put(*items[number])),
            "own": _median_ms(times, lambda number: own.get(items[number][0])),
            "shared": _median_ms(times, lambda number: reads.get(items[number][0])),
        }
        held = [reads.get(key) for key, _ in items]
        assert all(one == item for one, (_, item) in zip(held, items, strict=True))
        return {**result, "in use": _median_ms(times, lambda number: reads.get(items[number][0]))}


def measure_server(folder: str, images: list[Any], shares: bool) -> dict[str, Any]:
    """Milliseconds of an answer at the first frontend, at the second, and at the second again; and what was processed.
    `shares`: whether the frontends have one cache."""
    import httpx
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="q") as sockets:
        os.environ["QUIRE_RPC_BASE_PATH"] = sockets
        flags = ["--max-model-len", "8192", "--kv-cache-memory-bytes", "256M", "--cpu-threads", "1", "--port", "0"]
        words = SERVE if shares else ("-c", _ALONE, "serve")
        server = ServerProcess(*words, folder, "--api-server-count", "2", *flags)
        try:
            (place,) = Path(sockets).glob("quire-*")
            clients = [
                httpx.Client(
                    transport=httpx.HTTPTransport(uds=str(place / f"http-{number}")), base_url="http://x", timeout=300
                )
                for number in range(2)
            ]

            def ask(number: int, image: Any) -> float:
                file = io.BytesIO()
                Image.fromarray(image).save(file, "bmp")
                url = f"data:image/bmp;base64,{base64.b64encode(file.getvalue()).decode()}"
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
                began = time.perf_counter()
                clients[number].post("/v1/chat/completions", json=body).raise_for_status()
                return 1e3 * (time.perf_counter() - began)

            for number in range(2):  # the first image loads the processor
                ask(number, images[0])
            rounds = [[ask(number, image) for number in (0, 1, 1)] for image in images[1:]]
            text = "".join(client.get("/metrics?own=1").text for client in clients)
            counts = [
                sum(map(float, re.findall(rf"quire:mm_cache_{name}_total\{{.*?\}} (\S+)", text)))
                for name in ("queries", "hits")
            ]
            first, second, again = (statistics.median(each) for each in zip(*rounds, strict=True))
            processed = counts[0] - counts[1]
            return {
                "shares": shares,
                "images": len(images),
                "processed": processed,
                "first": first,
                "second": second,
                "again": again,
            }
        finally:
            server.kill()


def run(size: int = 1024, images: int = 12, rounds: int = 2) -> dict[str, Any]:
    """Milliseconds, of images of so many pixels a side. Servers of both kinds alternate, so many of each."""
    drawn = [np.random.default_rng(number).integers(0, 255, (size, size, 3), np.uint8) for number in range(images)]
    with tempfile.TemporaryDirectory() as folder:
        text = CONFIGS[ARCHITECTURE]["text_config"] | {"max_position_embeddings": 8192}
        make_tiny_vision(ARCHITECTURE, folder, processor=PIXELS, vision_config=VISION, text_config=text)
        servers = [measure_server(folder, drawn, shares) for _ in range(rounds) for shares in (False, True)]
        return {"size": size, "servers": servers, "cache": measure_cache(folder, drawn)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--images", type=int, default=12, help="different images")
    parser.add_argument("--rounds", type=int, default=2, help="servers whose frontends share, and as many whose do not")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    result = run(args.size, args.images, args.rounds)
    names = ("mb", "process", "keep", "own", "shared", "in use")
    print_records("The cache alone: MB of an image, and ms", dict(zip(names, names, strict=True)), [result["cache"]])
    names = ("shares", "images", "processed", "first", "second", "again")
    print_records("Two frontends: ms of an answer", dict(zip(names, names, strict=True)), result["servers"])
    return result | {"machine": common.machine()}
