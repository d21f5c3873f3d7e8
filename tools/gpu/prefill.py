"""Check and time prefill attention on a GPU: correctness against PyTorch first, then TFLOP/s of variants.

PYTHONPATH=src python3 tools/gpu/prefill.py [--json FILE]
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from packed import DEVICE, microseconds
from tests.oracles.operations import attention as plain

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.hopper import prefill_attention_hopper, unavailable
from quire.kernels.triton.attention.prefill import Tiles, choose_tiles, prefill_attention

reference = plain.paged_attention

DEADLINE = 100.0
CHECK_SECONDS = 40.0
"""Seconds after which nothing new is begun, and after which checks are given up."""


@dataclasses.dataclass
class Batch:
    qkv: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams

    def out(self) -> torch.Tensor:
        return torch.full_like(self.qkv[:, : self.params.num_heads * self.params.head_dim], 7.0)

    def flops(self) -> float:
        lengths = self.metadata.query_start.diff().tolist()
        pairs = 0.0
        for n, length in zip(lengths, self.metadata.seq_lens.tolist(), strict=False):
            if n >= 2:
                pairs += n * (length - n) + n * (n + 1) / 2
        return 4 * pairs * self.params.num_heads * self.params.head_dim


def make_batch(
    requests: list[tuple[int, int]],
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    padding: int = 0,
    garbage: bool = False,
    seed: int = 0,
    **params: object,
) -> Batch:
    """Requests as (tokens of this step, length of the context with them); pages shuffled."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    lengths = [length for _, length in requests]
    width = max(math.ceil(length / block_size) for length in lengths) + 1
    used = [math.ceil(length / block_size) for length in lengths]
    num_pages = sum(used) + 1
    order = (torch.randperm(num_pages - 1, generator=generator, device=DEVICE) + 1).int()
    table = torch.zeros(len(requests), width, dtype=torch.int32, device=DEVICE)
    cache = torch.randn(
        (2, num_pages, num_kv_heads, block_size, head_dim), generator=generator, device=DEVICE, dtype=dtype
    )
    if garbage:
        cache[:, 0] = float("nan")
    begin = 0
    for b, count in enumerate(used):
        table[b, :count] = order[begin : begin + count]
        begin += count
        if garbage and lengths[b] % block_size:
            cache[:, int(table[b, count - 1]), :, lengths[b] % block_size :] = float("nan")
    queries = [n for n, _ in requests]
    start = torch.tensor([0, *queries] + [0] * padding, device=DEVICE).cumsum(0).int()
    total = sum(queries)
    bound = total + padding
    qkv = torch.randn(bound, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator, device=DEVICE, dtype=dtype)
    metadata = AttentionMetadata(
        block_size=block_size,
        query_start=start,
        seq_lens=torch.tensor(lengths + [0] * padding, device=DEVICE, dtype=torch.int32),
        rows=torch.tensor([*range(len(requests))] + [0] * padding, device=DEVICE, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((bound,), -1, device=DEVICE),
        positions=torch.zeros(bound, device=DEVICE, dtype=torch.int32),
        shape=torch.tensor([total, len(requests), max(queries), max(lengths)], device=DEVICE),
        num_tokens=bound,
        num_requests=len(requests) + padding,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    whole = AttentionParams(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    return Batch(qkv, cache.to(kv_dtype or dtype), metadata, dataclasses.replace(whole, **params))  # type: ignore[arg-type]


Runner = Callable[[Batch, torch.Tensor, int], None]


def chosen(b: Batch, out: torch.Tensor, least: int) -> None:
    prefill_attention(b.qkv, b.kv_cache, b.metadata, b.params, out, least)


def plain(tiles: Tiles | None = None) -> Runner:
    def run(b: Batch, out: torch.Tensor, least: int) -> None:
        used = tiles or choose_tiles(b.params.head_dim, b.qkv.dtype, None)
        prefill_attention(b.qkv, b.kv_cache, b.metadata, b.params, out, least, used)

    return run


def hopper(**options: object) -> Runner:
    def run(b: Batch, out: torch.Tensor, least: int) -> None:
        reason = unavailable(b.qkv, b.kv_cache, b.params, b.metadata.block_size)
        if reason:
            raise NotImplementedError(reason)
        prefill_attention_hopper(b.qkv, b.kv_cache, b.metadata, b.params, out, least, **options)  # type: ignore[arg-type]

    return run


def check(name: str, run: Runner, b: Batch, least: int = 1) -> str:
    try:
        out, expected = b.out(), b.out()
        run(b, out, least)
        scaled = dataclasses.replace(b.params, scale=b.params.scale * b.params.k_scale)
        reference(b.qkv, b.kv_cache, b.metadata, scaled, expected)
        total = int(b.metadata.query_start[-1])
        error = (out[:total].float() - expected[:total].float()).abs().max().item()
        rest = (out[total:] == 7.0).all().item()
        ok = error < 0.03 and rest
        return f"{'ok ' if ok else 'BAD'} {error:.4f}"
    except NotImplementedError as reason:
        return f"-   {reason}"
    except Exception as error:
        return f"ERR {type(error).__name__}: {str(error)[:150]}"


RAGGED = [(300, 300), (2, 700), (129, 1000), (64, 64), (1, 900), (77, 333), (257, 4000)]
CHECKS: dict[str, dict] = {
    "ragged": {},
    "padding": {"padding": 5},
    "garbage": {"garbage": True},
    "window 100": {"window": 100},
    "window 700": {"window": 700},
    "cap": {"soft_cap": 5.0},
    "page 32": {"block_size": 32},
    "page 64": {"block_size": 64},
    "page 128": {"block_size": 128},
    "head 64": {"head_dim": 64},
    "head 256": {"head_dim": 256, "num_heads": 8, "num_kv_heads": 4},
    "head 80": {"head_dim": 80},
    "head 192": {"head_dim": 192, "num_heads": 8},
    "group 1": {"num_heads": 8},
    "group 7": {"num_heads": 28, "num_kv_heads": 4},
    "fp16": {"dtype": torch.float16},
    "fp8 pages": {"kv_dtype": torch.float8_e4m3fn, "k_scale": 0.5},
    "sinks": {},
    "alibi": {},
    "many": {},
}
SHAPES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "16k of 32k": ([(16384, 32768)], 32),
    "16 x 1024": ([(1024, 1024)] * 16, 32),
    "16 x 1024, 16 heads": ([(1024, 1024)] * 16, 16),
    "128 x 128": ([(128, 128)] * 128, 32),
    "128 x 128, 16 heads": ([(128, 128)] * 128, 16),
    "drawn lengths": ([(n, n) for n in range(40, 1500, 60)], 32),
    "1024+4x512+200 decode": ([(1024, 1024)] + [(512, 2000)] * 4 + [(1, 1000)] * 200, 32),
    "1k of 8k": ([(1024, 8192)], 32),
    "16k of 16k": ([(16384, 16384)], 32),
    "256 x 5 of 1000": ([(5, 1000)] * 256, 32),
}
"""Requests and query heads; 8 KV heads of 128."""
VARIANTS: dict[str, dict[str, Runner]] = {
    "hopper": {"hopper": hopper()},
    "plain": {"plain 128x64 w4 s2": plain(Tiles(128, 64, 4, 2)), "plain 64x64 w4 s3": plain(Tiles(64, 64, 4, 3))},
}
CHECKED: dict[str, Runner] = {"plain": plain(), "hopper": hopper()}


def deterministic(run: Runner, **params: object) -> str:
    """A prompt whole, in chunks beside others, and its last token alone."""
    try:
        n = 1500
        whole = make_batch([(n, n)], deterministic=True, **params)  # type: ignore[arg-type]
        expected = whole.out()
        run(whole, expected, 1)
        pages = whole.metadata.block_table[0]
        bad = 0
        for begin, end in ((0, 700), (700, 1111), (1111, 1499), (1499, 1500)):
            b = make_batch([(333, 600), (end - begin, end), (1, 77)], deterministic=True, seed=1, **params)  # type: ignore[arg-type]
            count = math.ceil(end / 16)
            b.kv_cache[:, b.metadata.block_table[1, :count].long()] = whole.kv_cache[:, pages[:count].long()]
            b.qkv[333 : 333 + end - begin] = whole.qkv[begin:end]
            out = b.out()
            run(b, out, 1)
            bad += int((out[333 : 333 + end - begin] != expected[begin:end]).any(1).sum())
        return "same bits" if bad == 0 else f"{bad} rows of {n} differ"
    except Exception as error:
        return f"ERR {type(error).__name__}: {str(error)[:150]}"


def yardsticks(n: int = 32768) -> None:
    """PyTorch's own kernels on one contiguous prompt."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 32, n, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, n, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                us = microseconds(
                    lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                )
            row = ["32k of 32k", f"torch {name}", us, 4 * n * (n + 1) / 2 * 32 * 128 / us / 1e6]
        except Exception as error:
            row = ["32k of 32k", f"torch {name}", None, str(error)[:100]]
        print("figure " + json.dumps(row), flush=True)


def captured(run: Runner) -> str:
    """A graph captured at bounds serves a smaller step that comes later."""
    try:
        b = make_batch([(300, 300), (200, 500), (1, 40)], padding=4)
        small = make_batch([(77, 200), (2, 33), (1, 5)], seed=3)
        out = b.out()
        run(b, out, 2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(b, out, 2)
        total = 80
        b.qkv[:total] = small.qkv
        pages = small.kv_cache.shape[1]
        b.kv_cache[:, :pages] = small.kv_cache
        b.metadata.block_table[:, : small.metadata.block_table.shape[1]] = small.metadata.block_table
        b.metadata.query_start[:4] = small.metadata.query_start
        b.metadata.query_start[4:] = total
        b.metadata.seq_lens.zero_()
        b.metadata.seq_lens[:3] = small.metadata.seq_lens
        out.fill_(7.0)
        graph.replay()
        expected = small.out()
        reference(small.qkv, small.kv_cache, small.metadata, small.params, expected)
        error = (out[:79].float() - expected[:79].float()).abs().max().item()
        ok = error < 0.03 and bool((out[79:] == 7.0).all())
        return f"{'ok ' if ok else 'BAD'} {error:.4f}"
    except Exception as error:
        return f"ERR {type(error).__name__}: {str(error)[:150]}"


def check_group(names: list[str]) -> None:
    """In a process of its own: a line for each check."""
    for name in names:
        for kind, run in CHECKED.items():
            if name.startswith("deterministic"):
                answer = deterministic(run, window=int(name.split()[-1]))
            elif name == "graph":
                answer = captured(run)
            else:
                options = dict(CHECKS[name])
                if name == "sinks":
                    options["sinks"] = torch.linspace(-2, 3, 32, device=DEVICE)
                if name == "alibi":
                    options["alibi_slopes"] = torch.logspace(-1, -8, 32, base=2, device=DEVICE)
                requests = [(3, 50)] * 290 + [(1, 60)] * 20 + [(200, 300)] if name == "many" else RAGGED
                b = make_batch(requests, **options)
                answer = check(kind, run, b) + ", again " + check(kind, run, b)
            print(f"check {name:16s} {kind:8s} {answer}", flush=True)


def time_variants(kind: str) -> None:
    """Every shape with every variant, once the word comes that nobody else is at work."""
    variants = VARIANTS[kind]
    small = make_batch([(128, 128)])
    out = small.out()
    for name, run in variants.items():
        try:
            run(small, out, 2)
            torch.cuda.synchronize()
        except Exception as error:
            print(name, repr(error)[:300], flush=True)
    sys.stdin.readline()
    for name, run in variants.items():
        begin = time.perf_counter()
        for _ in range(50):
            run(small, out, 2)
        print(f"{name}: a launch takes the host {(time.perf_counter() - begin) * 2e4:.0f} us", flush=True)
        torch.cuda.synchronize()
    for shape, (requests, heads) in SHAPES.items():
        b = make_batch(requests, num_heads=heads)
        out = b.out()
        for name, run in variants.items():
            try:
                ms = microseconds(lambda run=run, b=b, out=out: run(b, out, 2)) / 1e3
                row = [shape, name, ms * 1e3, b.flops() / ms / 1e9]
            except Exception as error:
                row = [shape, name, None, repr(error)[:200]]
            print("figure " + json.dumps(row), flush=True)
        del b, out
        torch.cuda.empty_cache()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float, word: str = "") -> list[str]:
    try:
        output, _ = process.communicate(word, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += "\nHUNG or out of time"
    if process.returncode and "HUNG" not in output:
        output = "\n".join(output.splitlines()[-3:])
    return output.splitlines()


def main() -> None:
    """Checks in processes side by side (compiling takes longest), then timing alone on the device."""
    target = Path(os.environ.get("OUT", ".")) / "prefill.json"
    data: dict[str, list[object]] = {"checks": [], "figures": []}
    begin = time.monotonic()
    timers = {kind: start("--time", kind) for kind in VARIANTS}
    checkers = [start("--check", name) for name in [*CHECKS, "deterministic 0", "deterministic 300", "graph"]]
    for process in checkers:
        lines = finish(process, CHECK_SECONDS - (time.monotonic() - begin))
        data["checks"] += lines
        print("\n".join(lines), flush=True)
    print(f"checks took {time.monotonic() - begin:.0f} s", flush=True)
    for kind in ("hopper", "torch", "plain"):
        process = timers.get(kind) or start("--torch")
        for line in finish(process, min(20.0, DEADLINE - (time.monotonic() - begin)), "go\n"):
            if line.startswith("figure "):
                shape, name, us, tflops = json.loads(line[7:])
                data["figures"].append([shape, name, us, tflops])
                print(f"{shape:24s} {name:24s}", tflops if us is None else f"{us:6.0f} us {tflops:4.0f} TFLOP/s")
            else:
                print(line)
        target.write_text(json.dumps(data, indent=1))
        sys.stdout.flush()
    print(f"triton {triton.__version__}, {torch.cuda.get_device_name()}, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--check", *names]:
            check_group(names)
        case ["--time", kind]:
            time_variants(kind)
        case ["--torch"]:
            yardsticks()
        case _:
            main()
