"""Tensor parallelism on two GPUs of one host: the same tokens as on one, latencies, sums by size, and a rank that is killed.

Every part has a process of its own. Prints a table last and writes $OUT/tp.json. `TP_SECONDS` bounds all of it.
"""

import faulthandler
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp"))
DEADLINE = time.monotonic() + float(os.environ.get("TP_SECONDS", "110"))
LARGE = os.environ.get("TP_MODEL", ".bench/models/llama-3.1-8b")
SIZES = [1 << n for n in range(12, 25)]
"""Bytes of a sum: a token of 4,096 bfloat16 values is 8 KiB."""
BATCHES = tuple(map(int, os.environ.get("TP_BATCHES", "1,32").split(",")))
CALLS = 20
"""Sums in one captured graph."""
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 4099,
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """`tp:BenchWorker` is made when a rank asks for it: the parent and the other parts need no torch for it."""
    if name != "BenchWorker":
        raise AttributeError(name)
    import torch
    import torch.distributed as dist

    from quire.distributed.peer_memory import PeerMemory
    from quire.worker.worker import Worker

    class BenchWorker(Worker):
        """A worker that measures its communicator. A rank that hangs shows where, after `TP_STACKS` seconds."""

        def __init__(self, config: Any, platform: Any) -> None:
            faulthandler.dump_traceback_later(float(os.environ.get("TP_STACKS", "15")))
            say(f"MARK rank {config.parallel.rank} begins {time.time() % 1000:.1f}")
            super().__init__(config, platform)
            say(f"MARK rank {config.parallel.rank} has met the others {time.time() % 1000:.1f}")
            self._bench_peer: PeerMemory | None = None
            if os.environ.get("TP_SUMS"):
                try:
                    self._bench_peer = PeerMemory(self._communicator.size, self.runtime.device(), max(SIZES))
                except RuntimeError as error:
                    say(f"no peer memory: {error}")

        def initialize(self, kv_cache: Any) -> None:
            """As ever, with a line before and after."""
            rank = self.config.parallel.rank
            say(f"MARK rank {rank} allocates {time.time() % 1000:.1f}")
            super().initialize(kv_cache)
            say(f"MARK rank {rank} is ready {time.time() % 1000:.1f}")

        def peer_bytes(self) -> int:
            """Up to how many bytes one kernel sums; 0: NCCL does all."""
            peer = self._communicator.peer_memory
            return peer.max_bytes if peer is not None else 0

        def _variants(self, x: torch.Tensor, peer: PeerMemory | None) -> dict[str, Any]:
            if peer is None:
                return {"nccl": lambda: dist.all_reduce(x)}
            group = dist.group.WORLD.group_name
            mine = peer._views[x.dtype][: x.shape[0]]

            def two_shot() -> None:
                mine.copy_(x)
                torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", group)
                x.copy_(mine)

            return {"nccl": lambda: dist.all_reduce(x), "one": lambda: peer.all_reduce(x), "two": two_shot}

        def time_sums(self, sizes: list[int]) -> dict[str, Any]:
            """Microseconds a sum, by size and way, of captured graphs."""
            device = self.runtime.device()
            peer = self._bench_peer
            table: dict[str, Any] = {}
            for size in sizes:
                x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
                table[str(size)] = row = {}
                for name, run in self._variants(x, peer).items():
                    run()
                    graph = self.runtime.capture(lambda run=run: [run() for _ in range(CALLS)])
                    for _ in range(2):
                        graph.replay(0, 0)
                    best = float("inf")
                    for _ in range(5):
                        begin, end = self.runtime.event(), self.runtime.event()
                        begin.record()
                        graph.replay(0, 0)
                        end.record()
                        end.wait()
                        best = min(best, end.milliseconds_since(begin))
                    row[name] = round(best * 1000 / CALLS, 2)
            return table

        def check_sums(self) -> list[float]:
            """Sums of random sizes one after the other, also in a graph: largest error, and largest difference of ranks."""
            device, ranks = self.runtime.device(), self._communicator
            generator = torch.Generator(device).manual_seed(ranks.rank)
            rng, error, apart = random.Random(5), 0.0, 0.0
            for dtype in (torch.bfloat16, torch.float32):
                for _ in range(20):
                    count = 8 * rng.randrange(1, 1 << rng.randrange(2, 17))
                    x = torch.randn(count, device=device, generator=generator).to(dtype)
                    parts = torch.empty(ranks.size, count, dtype=dtype, device=device)
                    ranks.all_gather(x, parts)
                    y, z = x.clone(), x.clone()
                    for _ in range(3):
                        y.copy_(x)
                        ranks.all_reduce(y)
                    graph = self.runtime.capture(lambda z=z, x=x: [z.copy_(x), ranks.all_reduce(z)])
                    for _ in range(3):
                        graph.replay(0, 0)
                    expected = parts.float().sum(0).to(dtype).float()
                    error = max(error, *((t.float() - expected).abs().max().item() for t in (y, z)))
                    every = torch.empty(ranks.size, count, dtype=dtype, device=device)
                    ranks.all_gather(z, every)
                    apart = max(apart, (every[0].float() - every[1].float()).abs().max().item())
            return [error, apart]

        def begin_profile(self) -> None:
            """Note every kernel from now on."""
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()

        def end_profile(self) -> list[list[Any]]:
            """The kernels that took longest: milliseconds, launches, name."""
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            rows = sorted(self._profile.key_averages(), key=lambda row: -row.device_time_total)[:9]
            return [[round(row.device_time_total / 1e3, 3), row.count, row.key[:60]] for row in rows]

    globals()["BenchWorker"] = BenchWorker
    return BenchWorker


def prompts(count: int, length: int, vocab: int = 4000) -> list[dict[str, list[int]]]:
    rng = random.Random(count)
    return [{"prompt_token_ids": rng.choices(range(10, vocab), k=length)} for _ in range(count)]


def make_llm(model: str, size: int, **settings: Any) -> Any:
    from quire import LLM

    if size > 1:
        settings |= {"tensor_parallel_size": size, "worker_cls": "tp:BenchWorker"}
    return LLM(
        model=model,
        load_format="dummy",
        device="cuda",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **settings,
    )


def say(line: str) -> None:
    """A line in one piece: several processes write to one file."""
    os.write(1, (line + "\n").encode())


def report(**figures: Any) -> None:
    """One line of JSON for the process that started this part."""
    say("REPORT " + json.dumps(figures))


# --- in processes of their own ---


def part_tiny() -> None:
    """Tokens, sums and death, with a small float32 model."""
    from quire import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        settings: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
        }  # fmt: skip
        lots = [prompts(1, length)[0] for length in (3, 50, 200, 17, 300, 64, 100, 1)]
        greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False, logprobs=1)
        seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True, detokenize=False)
        streams: dict[str, Any] = {}
        for name, size in (("one", 1), ("two", 2)):
            began = time.perf_counter()
            llm = make_llm(folder, size, **settings)
            started = time.perf_counter() - began
            runs = [llm.generate(lots, params, use_tqdm=False) for params in (greedy, greedy, seeded)]
            streams[name] = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in runs]
            figures = {"start_s": round(started, 2)}
            if size > 1:
                figures["same_tokens"] = [a == b for a, b in zip(streams[name], streams["one"], strict=True)]
                figures["peer_bytes"] = llm.collective_rpc("peer_bytes")
                figures["sum_errors"] = llm.collective_rpc("check_sums")
            report(**{f"tiny {name}": figures})
            if size > 1:
                report(sums=llm.collective_rpc("time_sums", args=(SIZES,))[0])
                report(death=kill_while_running(llm, lots))
            llm.shutdown()


def kill_while_running(llm: Any, lots: list[Any]) -> dict[str, Any]:
    """Kill rank 1 in the middle of steps; how long until the caller has the error."""
    import threading

    from quire import SamplingParams

    pid = llm.llm_engine.explain()["ranks"][1]["pid"]
    at: list[float] = []

    def kill() -> None:
        at.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    try:
        while True:
            llm.generate(lots, params, use_tqdm=False)
    except Exception as error:
        return {"seconds": round(time.perf_counter() - at[0], 3), "error": str(error)}


def part_large(size: int, way: str) -> None:
    """Latencies of the large model."""
    from quire import SamplingParams

    began = time.perf_counter()
    more = {"disable_custom_all_reduce": True} if way == "nccl" else {}
    llm = make_llm(
        LARGE, size, dtype="bfloat16", max_model_len=1024, max_num_seqs=256, gpu_memory_utilization=0.5, **more
    )
    figures: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 2)}
    name = f"TP={size} {way}".strip()

    digests: dict[int, str] = {}

    def run(batch: int, out: int) -> float:
        params = SamplingParams(temperature=0.6, seed=1, max_tokens=out, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts(batch, 128, 100000), params, use_tqdm=False)
        ended = time.perf_counter()
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        digests[batch] = hashlib.sha256(str(tokens).encode()).hexdigest()[:8]
        return ended - began

    for batch in BATCHES:
        for _ in range(2):
            run(batch, 6)
        first = min(run(batch, 1) for _ in range(2))
        whole = min(run(batch, 256) for _ in range(2 if batch == 1 else 1))
        figures[f"batch {batch}"] = {
            "first_ms": round(first * 1e3, 2), "step_ms": round((whole - first) / 255 * 1e3, 3), "whole_s": round(whole, 3),
            "tokens": digests[batch],
        }  # fmt: skip
        report(**{name: figures})
    if size > 1 and way != "nccl":
        for batch in (1, 32):
            llm.collective_rpc("begin_profile")
            run(batch, 24)
            figures[f"kernels {batch}"] = llm.collective_rpc("end_profile")[0]
            report(**{name: figures})
    llm.shutdown()


# --- all of them ---


def run_part(arguments: list[str], figures: dict[str, Any], most: float, **environment: str) -> None:
    """A part in a session of its own, which is killed whole at its limit; what it reports is printed and kept as it comes."""
    left = min(most, DEADLINE - time.monotonic())
    label = " ".join(arguments)
    if left < 9:
        figures.setdefault("left out", []).append(label)
        return
    began = time.monotonic()
    log = OUT / f"tp-{'-'.join(arguments)}.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TP_STACKS": str(max(3.0, left - 4)), **environment},
        )
        code: int | None = None
        seen = 0
        while code is None:
            time.sleep(0.2)
            code = process.poll()
            if code is None and time.monotonic() - began > left:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            lines = log.read_text(errors="replace").split("\n")[:-1]  # whole ones
            for line in lines[seen:]:
                if line.startswith("REPORT "):
                    figures.update(json.loads(line[7:]))
                if line.startswith(("REPORT ", "MARK ")):
                    print(line[:1500], flush=True)
            seen = len(lines)
    (OUT / "tp.json").write_text(json.dumps({"benchmark": "tp", **figures}, indent=2) + "\n", encoding="utf-8")
    print(f"--- {label}: code {code} after {time.monotonic() - began:.1f} s", flush=True)
    noise = lines if code else [line for line in lines if "sums" in line or "WARNING" in line]
    shown = [line[:220] for line in noise if not line.startswith(("REPORT", "MARK"))]
    print("\n".join(shown[-90:]), flush=True)


def print_table(figures: dict[str, Any]) -> None:
    sums = figures.get("sums", {})
    if sums:
        print(f"{'sum, KiB':>10}" + "".join(f"{name:>9}" for name in ("nccl", "one", "two")) + "  us")
        for size, row in sums.items():
            print(f"{int(size) / 1024:>10g}" + "".join(f"{value:>9}" for value in row.values()))
    for name, entry in figures.items():
        if name == "sums":
            continue
        if not isinstance(entry, dict):
            print(f"{name}: {entry}")
            continue
        print(name + ":")
        for key, value in entry.items():
            rows = value if isinstance(value, list) and value and isinstance(value[0], list) else None
            print(f"  {key}: {'' if rows else value}")
            for row in rows or []:
                print(f"    {row}")


def main() -> int:
    if len(sys.argv) > 1:
        faulthandler.dump_traceback_later(float(os.environ.get("TP_STACKS", "15")) - 1)
        try:
            if sys.argv[1] == "tiny":
                part_tiny()
            else:
                part_large(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    figures: dict[str, Any] = {}
    run_part(["tiny"], figures, 45, TP_SUMS="1")  # the first start on a machine takes longest
    run_part(["large", "2", "nccl"], figures, 24)
    run_part(["large", "2", "one-shot"], figures, 30)
    run_part(["large", "1"], figures, 40)
    print_table(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
