#!/usr/bin/env python3
"""Sweeps the blocks of the matrix kernels on this GPU, beside cuBLAS: `PYTHONPATH=src python3 tools/gpu/linear.py [seconds]`.

For each matrix of two model shapes and each number of rows: a graph of many launches over weights that do not fit into the
L2 cache, checked against cuBLAS first. Prints the best of each; everything goes to linear.json. Variants are compiled in
processes of their own beforehand, since compiling takes longer than measuring.
"""

import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import re
import sys
import time

import torch

from quire.kernels import ops, registry
from quire.kernels.triton.linear import configs as linear_configs
from quire.kernels.triton.linear import matmul as linear
from quire.kernels.triton.linear.configs import DotConfig, GemvConfig
from quire.kernels.triton.norm import (
    activations,  # noqa: F401
    norms,  # noqa: F401
)

START = time.monotonic()
BUDGET = float(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].replace(".", "").isdigit() else 58.0
ROWS = (32, 1, 16, 64, 4, 2, 8)
# name: (outputs, inputs, norm, gated, adds, float32 out)
SHAPES = {
    "0.6B qkv": (4096, 1024, True, False, False, False),
    "0.6B out": (1024, 2048, False, False, True, False),
    "0.6B gate_up": (3072, 1024, True, True, False, False),
    "0.6B down": (1024, 3072, False, False, True, False),
    "0.6B head": (151936, 1024, False, False, False, True),
    "8B qkv": (6144, 4096, True, False, False, False),
    "8B out": (4096, 4096, False, False, True, False),
    "8B gate_up": (14336, 4096, True, True, False, False),
    "8B down": (4096, 14336, False, False, True, False),
    "8B head": (128256, 4096, False, False, False, True),
}


def left() -> float:
    return BUDGET - (time.monotonic() - START)


def gemv_configs(n: int, k: int, gated: bool, rows: int) -> list[GemvConfig]:
    if rows > 4:
        return []
    found = []
    blocks = ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
    for (block_k, num_warps), block_n in itertools.product(blocks, (1, 2, 4, 8)):
        elements = block_n * block_k * (2 if gated else 1) // (num_warps * 32)
        if block_k < 2 * k and 32 <= elements <= 64 and elements * rows <= 256:
            found.append(GemvConfig(block_n, block_k, num_warps))
    return found


def dot_configs(n: int, k: int, gated: bool, normed: bool, adds: bool, rows: int) -> list[DotConfig]:
    if rows < 4 or rows > 64:
        return []
    block_t, matrix_rows = max(rows, 16), n * (2 if gated else 1)
    is_small = matrix_rows * k <= linear_configs.SMALL_MATRIX
    blocks = [(64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (128, 128, 3, 8), (128, 64, 6, 8)]
    if is_small:
        blocks = [(64, 128, 4, 4), (64, 256, 3, 4), (64, 256, 4, 4), (64, 512, 2, 8)]
    splits = ((2, 4) if is_small else (1, 2, 4)) if adds else (1,)
    norm_modes = {16: (False,), 32: (False, True), 64: (True,)}[block_t] if normed else (False,)
    found = []
    for (block_n, block_k, stages, num_warps), split, norms_first in itertools.product(blocks, splits, norm_modes):
        if (block_n + block_t) * stages * block_k * 2 <= 220_000:
            found.append(DotConfig(block_t, block_n, block_k, split, stages, num_warps, norms_first))
    return found


def configs_of(name: str, rows: int) -> list:
    n, k, normed, gated, adds, _ = SHAPES[name]
    return [*gemv_configs(n, k, gated, rows), *dot_configs(n, k, gated, normed, adds, rows)]


class Product:
    """One operation with its buffers."""

    def __init__(self, name: str, rows: int, n: int, k: int, weights: list) -> None:
        _, _, self.normed, self.gated, self.adds, wide = SHAPES[name]
        dtype = torch.float32 if wide else torch.bfloat16
        self.x = torch.randn(rows, k, device="cuda").bfloat16()
        self.norm = torch.rand(k, device="cuda") + 0.5
        self.out = torch.zeros(rows, n, device="cuda", dtype=dtype)
        self.scratch = torch.empty_like(self.x)
        self.wide = torch.empty(rows, 2 * n, device="cuda", dtype=torch.bfloat16) if self.gated else None
        self.weights = weights

    def run(self, weight) -> None:
        if self.gated:
            linear.norm_linear_gated(self.x, self.norm, 1e-6, weight, "silu", self.out, self.scratch, self.wide)
        elif self.normed:
            linear.norm_linear(self.x, self.norm, 1e-6, weight, self.out, self.scratch)
        elif self.adds:
            linear.linear_add(self.x, weight, self.out)
        else:
            linear.linear(self.x, weight, self.out)

    def result(self) -> torch.Tensor:
        self.out.fill_(0.25 if self.adds else float("nan"))
        self.run(self.weights[0])
        return self.out.float().clone()


def use(config) -> None:
    linear_configs.choose = lambda *_: config


def make_weights(rows: int, k: int, count: int) -> list:
    return [ops.pack_linear((torch.randn(rows, k, device="cuda") / k**0.5).bfloat16()) for _ in range(count)]


@functools.cache
def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def microseconds(function, launches: int) -> float:
    """Median time of a launch inside a graph."""
    stream = side_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        for _ in range(2):
            graph.replay()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 500)
    return sorted(times)[3] / launches


ready: set[tuple] = set()


def compile_one(job) -> str | None:
    """In a process of its own: fills Triton's cache on disk."""
    name, rows, config = job
    try:
        ops.select("cuda")
        n, k = 256, SHAPES[name][1]
        use(config)
        product = Product(name, rows, n, k, make_weights(2 * n if SHAPES[name][3] else n, k, 1))
        product.run(product.weights[0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[-300:]}"
    return None


def compiled_as(name: str, rows: int, config) -> tuple:
    """What the compiler sees of a variant."""
    _, k, *operation = SHAPES[name]
    if isinstance(config, GemvConfig):
        return (*operation, config, k >= config.block_k, k > config.block_k, rows)
    return (*operation, config, k % config.block_k == 0)


def compile_all(jobs: list, seconds: float) -> list[str]:
    seen, unique = set(), []
    for job in jobs:
        if compiled_as(*job) not in seen:
            seen.add(compiled_as(*job))
            unique.append(job)
    errors: list[str] = []
    begin = time.monotonic()
    workers = max(2, min(14, (os.cpu_count() or 4) - 2))
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(compile_one, job) for job in unique]
    try:
        for future in concurrent.futures.as_completed(futures, timeout=seconds):
            error = future.result()
            if error:
                errors.append(error)
    except TimeoutError:
        errors.append("not everything was compiled beforehand")
    pool.shutdown(wait=False, cancel_futures=True)
    for job, future in zip(unique, futures, strict=True):
        if future.done() and not future.cancelled() and future.result() is None:
            ready.add(compiled_as(*job))
    done = len(ready)
    print(f"compiled {done} of {len(unique)} in {time.monotonic() - begin:.0f} s, {len(errors)} errors", flush=True)
    return errors


def sweep(name: str, rows: int, weights: list, results: list) -> None:
    n, k, *_ = SHAPES[name]
    product = Product(name, rows, n, k, weights)
    launches = max(len(weights), 8 if "0.6B" in name else 4)

    def chain() -> None:
        for i in range(launches):
            product.run(weights[i % len(weights)])

    use(None)
    expected = product.result()
    for config in (None, *configs_of(name, rows)):
        if left() < 14:
            return
        if config is not None and compiled_as(name, rows, config) not in ready:
            continue
        entry = {"shape": name, "rows": rows, "config": str(config)}
        results.append(entry)
        try:
            use(config)
            entry["error"] = float((product.result() - expected).abs().max() / expected.abs().max())
            entry["us"] = microseconds(chain, launches)
        except Exception as error:
            entry["failure"] = str(error)[-300:]


def chains(best: dict, results: list) -> None:
    """A model's layers in order with the best of each, beside cuBLAS."""
    for model, layers in (("0.6B", 28), ("8B", 8)):
        names = [f"{model} {part}" for part in ("qkv", "out", "gate_up", "down")]
        weights = {m: make_weights(SHAPES[m][0] * (2 if SHAPES[m][3] else 1), SHAPES[m][1], layers) for m in names}
        for rows in ROWS:
            if left() < 3:
                return
            products = {m: Product(m, rows, *SHAPES[m][:2], weights[m]) for m in names}
            line = f"layer {model} T={rows:3d}:"
            for label in ("best", "cublas", "chosen"):

                def chain(label=label, products=products, names=names, layers=layers, rows=rows) -> None:
                    for i in range(layers):
                        for m in names:
                            if label == "chosen":
                                linear_configs.choose = ORIGINAL
                            else:
                                use(None if label == "cublas" else best.get((m, rows)))
                            products[m].run(products[m].weights[i])

                try:
                    us = microseconds(chain, layers)
                except Exception as error:
                    us = float("nan")
                    line += str(error)[-80:]
                results.append({"chain": model, "rows": rows, "label": label, "us": us})
                line += f" {label} {us:7.1f}"
            ideal = sum(2 * SHAPES[m][0] * (2 if SHAPES[m][3] else 1) * SHAPES[m][1] for m in names) / 4.2e6
            print(f"{line} µs a layer (bytes {ideal:.1f})", flush=True)
        del weights
        torch.cuda.empty_cache()


ORIGINAL = linear_configs.choose


def check() -> None:
    """All operations against the reference, on drawn shapes, as they are chosen."""
    linear_configs.choose = ORIGINAL
    reference = {op: next(k.function for k in registry.implementations(op) if k.platform == "any") for op in
                 ("linear", "norm_linear", "norm_linear_gated", "linear_add")}  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    worst: dict[str, float] = {}
    for i, rows in enumerate((1, 2, 3, 4, 5, 7, 16, 17, 33, 64, 100, 129, 300)):
        n, k = (int(torch.randint(1, 700, (1,), generator=generator)) for _ in range(2))
        n, k = (n * 8, k * 8) if i % 2 else (n, k)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, norm = torch.randn(rows, k, device="cuda").to(dtype), torch.randn(k, device="cuda")
            plain, pair = (
                ops.pack_linear(
                    (torch.randn(m, k, device="cuda") / k**0.5).to(dtype),
                    torch.randn(m, device="cuda") if i % 3 else None,
                )
                for m in (n, 2 * n)
            )
            start = torch.randn(rows, n, device="cuda").to(dtype)
            for prefix in ("", "invariant_"):
                for op, oracle in reference.items():
                    function, outs = functools.partial(getattr(linear, op), is_invariant=bool(prefix)), []
                    for f in (function, oracle):
                        out = start.clone() if op == "linear_add" else torch.full_like(start, float("nan"))
                        extra = (torch.empty_like(x), torch.empty(rows, 2 * n, device="cuda", dtype=dtype))
                        if op == "linear":
                            f(x, plain, out)
                        elif op == "norm_linear":
                            f(x, norm, 1e-6, plain, out, extra[0])
                        elif op == "norm_linear_gated":
                            f(x, norm, 1e-6, pair, "silu", out, *extra)
                        else:
                            f(x, plain, out)
                        outs.append(out.float())
                    error = float((outs[0] - outs[1]).abs().max() / outs[1].abs().max())
                    bound = 1e-5 if dtype == torch.float32 else 2e-2
                    if not error < bound:
                        print(f"WRONG {prefix}{op} {dtype} T={rows} N={n} K={k}: {error}", flush=True)
                    key = f"{prefix}{op}"
                    worst[key] = max(worst.get(key, 0.0), error)
    # Rows of the invariant product in batches of other sizes.
    weight = make_weights(384, 512, 1)[0]
    x = torch.randn(300, 512, device="cuda").bfloat16()
    whole = torch.empty(300, 384, device="cuda", dtype=torch.bfloat16)
    linear.linear(x, weight, whole, is_invariant=True)
    for rows in (1, 17, 64, 100):
        part = torch.empty_like(whole[:rows])
        linear.linear(x[7 : 7 + rows], weight, part, is_invariant=True)
        if not torch.equal(part, whole[7 : 7 + rows]):
            print(f"WRONG invariant_linear: rows differ at T={rows}", flush=True)
    print("worst relative errors:", {k: f"{v:.1e}" for k, v in worst.items()}, flush=True)


def main() -> None:
    out = os.path.join(os.environ.get("OUT", "."), "linear.json")
    ops.select("cuda")
    results: list[dict] = []
    jobs = [(name, rows, config) for rows in ROWS for name in SHAPES for config in configs_of(name, rows)]
    errors = compile_all(jobs, BUDGET * 0.45)
    best: dict[tuple, object] = {}
    text = {str(c): c for _, _, c in jobs}
    weights = {}
    for name, (n, k, _, gated, *_) in SHAPES.items():
        m = n * (2 if gated else 1)
        weights[name] = make_weights(m, k, max(2, min(56, 400_000_000 // (2 * m * k))))
    for rows in ROWS:
        for name in SHAPES:
            if left() > 14:
                before = len(results)
                try:
                    sweep(name, rows, weights[name], results)
                except Exception as error:
                    print(name, rows, str(error)[-200:], flush=True)
                report(name, rows, results[before:], best, text)
        with open(out, "w") as file:
            json.dump({"results": results, "errors": errors}, file)
    weights.clear()
    torch.cuda.empty_cache()
    print(f"{left():.0f} s left", flush=True)
    chains(best, results)
    try:
        check()
    except Exception as error:
        print("check failed:", str(error)[-500:], flush=True)
    with open(out, "w") as file:
        json.dump({"results": results, "errors": errors}, file)
    for error in errors[:3]:
        print(error[:400])
    failures = [e for e in results if "failure" in e]
    print(
        f"{len(failures)} failures",
        *(f"{e['shape']} {e['config']} {e['failure'][:200]}" for e in failures[:3]),
        sep="\n",
    )


def report(name: str, rows: int, entries: list, best: dict, text: dict) -> None:
    """The best of a sweep, to the log and to `best`."""
    n, k, _, gated, *_ = SHAPES[name]
    entries = [e for e in entries if "us" in e]
    good = sorted((e for e in entries if e["config"] != "None" and e["error"] < 2e-2), key=lambda e: e["us"])
    library = [e["us"] for e in entries if e["config"] == "None"]
    if good and library:
        best[name, rows] = text[good[0]["config"]] if good[0]["us"] < library[0] else None
        fields = re.sub(r"Config|[a-z_]+=|1073741824", "", good[0]["config"])
        wrong = sum(not e["error"] < 2e-2 for e in entries)
        bytes_us = 2 * n * (2 if gated else 1) * k / 4.2e6
        print(
            f"{name} T={rows:3d} {good[0]['us']:7.2f} (cuBLAS {library[0]:7.2f}, bytes {bytes_us:.1f}) {fields}"
            + (f" {wrong} WRONG" if wrong else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
