"""Pages of a prompt from one GPU's engine to another's: through NCCL (`nccl`) and by way of both hosts' memory (`tcp`).

    PYTHONPATH=src python3 tools/gpu/hand_over.py [--device cpu --only-tiny]

First the tokens of a tiny model, with a prefill engine that works, then with one that stalls half-way, works again, and is killed
half-way: always those of one engine alone. Then an 8B shape with dummy weights: time from a request to its first token with pages
that are fetched and without, and GB/s of the fetch. Prints a table, writes $OUT/hand_over.json. Each engine has a process and a
GPU of its own.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scale import DENSE, MODELS, TINY, prompts

OUT = Path(os.environ.get("OUT", "/tmp"))
LENGTH, ROUNDS = 8192, 4
Answer = dict[str, Any]


# --- an engine in a process of its own ---


def break_off(mode: str) -> None:
    """Have this engine's first transfer stall half-way, and its third one kill it half-way."""
    from quire.distributed.page_link import PageLink

    whole, calls = PageLink.send, list[int]()

    def send(self: PageLink, rows: list[Any]) -> None:
        calls.append(len(rows))
        whole(self, rows if len(calls) == 2 else rows[: max(1, len(rows) // 2)])
        if len(calls) == 1:
            threading.Event().wait()
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if mode == "breaks":
        PageLink.send = send  # type: ignore[method-assign]


def watch_fetches() -> list[tuple[int, float]]:
    """Bytes and seconds of each fetch from now on."""
    from quire.worker.tcp_tier import TcpTier

    fetches, gather = list[tuple[int, float]](), TcpTier.gather

    def timed(self: TcpTier, names: list[bytes]) -> Any:
        began = time.perf_counter()
        pages = gather(self, names)
        fetches.append((pages.nbytes, time.perf_counter() - began))
        return pages

    TcpTier.gather = timed  # type: ignore[method-assign]
    return fetches


def serve(model: str, role: str, connector: str, mode: str, settings: Answer) -> None:
    """Answer requests, a line of JSON each."""
    from quire import LLM, SamplingParams

    break_off(mode)
    fetches = watch_fetches()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    extra = {"timeout_s": 8.0 if mode else 20.0, "max_bytes": 4 << 30}
    transfer = {"kv_connector": connector, "kv_role": role, "kv_port": port, "kv_connector_extra_config": extra}
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, kv_transfer_config=transfer, **settings)
    write({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        llm.reset_prefix_cache()
        fetches.clear()
        told = {} if asked["params"] is None else {"kv_transfer_params": asked["params"]}
        params = SamplingParams(
            temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False, extra_args=told
        )
        began = time.perf_counter()
        output: Any = llm.generate([{"prompt_token_ids": asked["prompt"]}], params, use_tqdm=False)[0]
        seconds = time.perf_counter() - began
        write({
            "tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0, "seconds": seconds,
            "params": output.kv_transfer_params, "fetches": fetches,
        })  # fmt: skip
    llm.shutdown()


def write(answer: Answer) -> None:
    os.write(1, ("ANSWER " + json.dumps(answer) + "\n").encode())


class Engine:
    """What `serve` does, from outside."""

    def __init__(self, gpu: int, *arguments: str) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": f"{gpu},{1 - gpu}"}
        command = [sys.executable, __file__, "--serve", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def read(self) -> Answer:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise RuntimeError(f"an engine has ended with {self.process.wait()}")

    def ask(self, prompt: list[int], params: Answer | None, max_tokens: int) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "params": params, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        return self.read()


@contextlib.contextmanager
def two_engines(model: str, connector: str, settings: Answer, mode: str = "") -> Iterator[tuple[Engine, Engine]]:
    roles = ("kv_producer", "kv_consumer")
    pair = [Engine(gpu, model, role, connector, mode, json.dumps(settings)) for gpu, role in enumerate(roles)]
    try:
        for engine in pair:
            engine.read()
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            engine.process.kill()
            engine.process.wait()


THERE: Answer = {"do_remote_decode": True, "do_remote_prefill": False}


def handed_over(prefill: Engine, decode: Engine, prompt: list[int], max_tokens: int = 16) -> Answer:
    """What the decoding engine answers with the other one's pages."""
    return decode.ask(prompt, prefill.ask(prompt, THERE, 1)["params"], max_tokens)


# --- all of them ---


def check(connector: str, device: str) -> Answer:
    """Whether tokens are always those of one engine, and pages were used where they should be."""
    found: Answer = {}
    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 28}
    settings = {**sizes, "dtype": "float32", "device": device}
    prompt = prompts(1, 400, 4000)[0]["prompt_token_ids"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY["dense"]))
        with two_engines(folder, connector, settings) as (prefill, decode):
            expected = decode.ask(prompt, None, 16)["tokens"]
            for name in ("first", "again"):
                answer = handed_over(prefill, decode, prompt)
                found[name] = answer["tokens"] == expected and answer["cached"] > 300
        if connector == "nccl":
            with two_engines(folder, connector, settings, "breaks") as (prefill, decode):
                for name, is_fetched in (("stalled", False), ("after it", True), ("killed", False)):
                    answer = handed_over(prefill, decode, prompt)
                    found[name] = answer["tokens"] == expected and (answer["cached"] > 300) is is_fetched
                    found[f"{name}, s"] = round(answer["seconds"], 2)
                found["goes on"] = decode.ask(prompt, None, 16)["tokens"] == expected
    return found


def measure(connector: str, device: str) -> Answer:
    """Milliseconds to the first token of long prompts, and GB/s."""
    sizes = {
        "max_model_len": LENGTH + 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": LENGTH,
        "gpu_memory_utilization": 0.7,
    }
    with two_engines(str(MODELS / DENSE), connector, {**sizes, "dtype": "bfloat16", "device": device}) as (
        prefill,
        decode,
    ):
        rows: list[Answer] = []
        for each in prompts(ROUNDS, LENGTH, 100000):
            prompt = each["prompt_token_ids"]
            computed, fetched = decode.ask(prompt, None, 1), handed_over(prefill, decode, prompt, 1)
            sizes_and_seconds = fetched["fetches"] or [(0, 1.0)]
            rows.append({
                "computed_ms": round(computed["seconds"] * 1e3, 1), "fetched_ms": round(fetched["seconds"] * 1e3, 1),
                "cached": fetched["cached"], "gb_per_s": round(sizes_and_seconds[0][0] / sizes_and_seconds[0][1] / 1e9, 2),
            })  # fmt: skip
        return {
            "rounds": rows,
            "best": {key: (max if key == "gb_per_s" else min)(row[key] for row in rows) for key in rows[0]},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only-tiny", action="store_true")
    parser.add_argument("--serve", nargs=5)
    arguments = parser.parse_args()
    if arguments.serve:
        model, role, connector, mode, settings = arguments.serve
        serve(model, role, connector, mode if role == "kv_producer" else mode and "hasty", json.loads(settings))
        return 0
    found: Answer = {"benchmark": "hand_over", "tokens": LENGTH, "model": DENSE, "same_tokens": {}, "measured": {}}
    for connector in ("nccl", "tcp"):
        found["same_tokens"][connector] = check(connector, arguments.device)
        print(connector, json.dumps(found["same_tokens"][connector]), flush=True)
        if not arguments.only_tiny:
            found["measured"][connector] = measure(connector, arguments.device)
        (OUT / "hand_over.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{'':8}{'computed ms':>14}{'fetched ms':>14}{'GB/s':>10}{'tokens':>10}")
    for connector, figures in found["measured"].items():
        best = figures["best"]
        print(
            f"{connector:8}{best['computed_ms']:>14}{best['fetched_ms']:>14}{best['gb_per_s']:>10}{best['cached']:>10}"
        )
    return 0 if all(value for part in found["same_tokens"].values() for value in part.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
