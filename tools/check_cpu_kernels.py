"""Checks and times the native CPU kernels on this machine, for every instruction set that it can run.

    python tools/check_cpu_kernels.py [--isa NAME ...] [--threads N] [--quick] [--no-timing] [--json FILE]

Each instruction set runs in a process of its own. Correctness: the kernels' test module, with the instruction set forced.
Speed: GEMV beside a read test of the same rounds (only the ratio means anything on a shared machine), linear layers beside torch,
attention, and the cost of a replayed operation.
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels import cpu, ops, packed
from quire.kernels.cpu import recording
from quire.kernels.cpu.binding import structure
from quire.kernels.cpu.library import library
from quire.kernels.types import PackedWeight

READ = structure("READ", ("source", ctypes.c_void_p), longs="bytes", pointers="sink")
ROOT = pathlib.Path(__file__).resolve().parent.parent
GEMV_SHAPES = [(1024, 512), (3072, 512), (512, 1536), (32000, 512), (4096, 1024), (1024, 3072), (4096, 4096)]
GEMM_ROWS = [1, 4, 8, 32, 64, 256, 2048]


def seconds_of(function: Callable[[], Any], rounds: int, least: float = 0.02) -> float:
    """The best of `rounds`, each at least so many seconds long."""
    start = time.perf_counter()
    function()
    repeats = max(1, int(least / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


class ReadTest:
    """Reads 512 MiB with all threads."""

    def __init__(self) -> None:
        self._memory = torch.zeros(512 << 20, dtype=torch.uint8)
        self._sink = torch.zeros(1024, dtype=torch.int64)
        self._call = READ(self._memory.data_ptr(), self._memory.numel(), self._sink.data_ptr())

    def gigabytes_a_second(self) -> float:
        start = time.perf_counter()
        library().run(library().operation("read"), self._call, 1, ())
        return self._memory.numel() / (time.perf_counter() - start) / 1e9


def time_gemv(dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One row over weights of 256 MiB together, replayed as a step would."""
    rows, read = [], ReadTest()
    for n, k in GEMV_SHAPES:
        count = max(2, (256 << 20) // (n * k * dtype.itemsize))
        weights = [ops.pack_linear(torch.zeros(n, k, dtype=dtype)) for _ in range(count)]
        x, out = torch.randn(1, k), torch.empty(1, n)
        step = recording.record(lambda w=weights, x=x, out=out: [ops.linear(x, each, out) for each in w], 1, 2)
        assert step is not None
        pairs = []
        for _ in range(rounds):
            reading = read.gigabytes_a_second()
            start = time.perf_counter()
            step.replay(1, 0)
            pairs.append((count * n * k * dtype.itemsize / (time.perf_counter() - start) / 1e9, reading))
        pairs.sort(key=lambda pair: pair[0] / pair[1])
        gemv, reading = pairs[len(pairs) // 2]
        rows.append(
            {"dtype": str(dtype), "n": n, "k": k, "gemv_gb_s": gemv, "read_gb_s": reading, "share": gemv / reading}
        )
    return rows


def packed_weight(n: int, k: int, bits: int) -> PackedWeight:
    """Groups of 32 columns with float16 scales: what llama.cpp calls Q4_0 and Q8_0."""
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8) if bits == 4 else torch.zeros(n, k, dtype=torch.int8)
    zero = torch.full((n, k // 32), 8.0) if bits == 4 else None
    return PackedWeight(n, k, torch.bfloat16, codes, scale=torch.rand(n, k // 32).half().float(), zero=zero)


def time_packed(bits: int, rounds: int) -> list[dict[str, Any]]:
    """One row over weights of 128 MiB together beside a read test; many rows in operations a second."""
    rows, read = [], ReadTest()
    for n, k in GEMV_SHAPES:
        size = n * k * bits // 8 + n * k // 16
        weights = [packed.pack_codes(packed_weight(n, k, bits)) for _ in range(max(2, (128 << 20) // size))]
        x, out = torch.randn(1, k), torch.empty(1, n)
        step = recording.record(
            lambda w=weights, x=x, out=out: [packed.packed_linear(x, each, out) for each in w], 1, 2
        )
        assert step is not None
        pairs = []
        for _ in range(rounds):
            reading = read.gigabytes_a_second()
            start = time.perf_counter()
            step.replay(1, 0)
            pairs.append((len(weights) * size / (time.perf_counter() - start) / 1e9, reading))
        pairs.sort(key=lambda pair: pair[0] / pair[1])
        gemv, reading = pairs[len(pairs) // 2]
        entry: dict[str, Any] = {
            "bits": bits,
            "n": n,
            "k": k,
            "gemv_gb_s": gemv,
            "read_gb_s": reading,
            "share": gemv / reading,
        }
        for m in (8, 64, 512):
            x, out = torch.randn(m, k), torch.empty(m, n)
            taken = seconds_of(lambda x=x, w=weights[0], out=out: packed.packed_linear(x, w, out), rounds)
            entry[f"gop_s_{m}"] = 2 * m * n * k / taken / 1e9
        rows.append(entry)
    return rows


def time_gemm(dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n, k in ((1024, 1024), (4096, 4096)):
        weight = torch.randn(n, k)
        typed, packed = weight.to(dtype), ops.pack_linear(weight.to(dtype))
        for m in GEMM_ROWS:
            x, out = torch.randn(m, k), torch.empty(m, n)
            operations = 2 * m * n * k / 1e9
            ours = seconds_of(lambda x=x, w=packed, out=out: ops.linear(x, w, out), rounds)
            plain = seconds_of(lambda x=x, w=weight: torch.nn.functional.linear(x, w), rounds)
            typed_x = x.to(dtype)
            same = seconds_of(lambda x=typed_x, w=typed: torch.nn.functional.linear(x, w), 1, 0)
            rows.append(
                {
                    "dtype": str(dtype),
                    "n": n,
                    "k": k,
                    "m": m,
                    "gflop_s": operations / ours,
                    "torch_f32_gflop_s": operations / plain,
                    "torch_same_dtype_gflop_s": operations / same,
                }
            )
    return rows


def one_request_batch(requests: int, new: int, length: int, size: int = 16) -> AttentionMetadata:
    """`requests` requests alike, each computing `new` tokens of a context of `length`."""
    pages = (length + size - 1) // size
    table = torch.randperm(requests * pages).int().view(requests, pages)
    positions = torch.arange(length - new, length).repeat(requests)
    which = torch.arange(requests).repeat_interleave(new)
    slots = table[which, positions // size].long() * size + positions % size
    return AttentionMetadata(
        size,
        torch.arange(0, requests * new + 1, new).int(),
        torch.full((requests,), length, dtype=torch.int32),
        torch.arange(requests).int(),
        table,
        slots,
        positions.int(),
        torch.tensor([requests * new, requests, new, length]),
        requests * new,
        requests,
        new,
        length,
    )


def time_attention(dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n, k, h in ((8, 4, 64), (16, 8, 128)):
        for requests, new, length in ((1, 2048, 2048), (1, 1, 8192), (32, 1, 512)):
            metadata = one_request_batch(requests, new, length)
            tokens = requests * new
            qkv, out = torch.randn(tokens, (n + 2 * k) * h), torch.empty(tokens, n * h)
            cache = torch.randn(2, int(metadata.block_table.numel()), k, 16, h).to(dtype)
            params = AttentionParams(n, k, h, h**-0.5)

            def attend(qkv=qkv, cache=cache, metadata=metadata, params=params, out=out) -> None:
                ops.paged_attention(qkv, cache, metadata, params, out)

            taken = seconds_of(attend, rounds)
            entry: dict[str, Any] = {
                "dtype": str(dtype),
                "heads": n,
                "kv_heads": k,
                "head_dim": h,
                "requests": requests,
            }
            entry |= {"new_tokens": new, "context": length, "ms": taken * 1e3}
            if new > 1:
                entry["gflop_s"] = 2 * new * length * n * h / taken / 1e9
            else:
                entry["gb_s"] = requests * length * 2 * k * h * dtype.itemsize / taken / 1e9
            rows.append(entry)
    return rows


def time_overheads(rounds: int) -> dict[str, float]:
    """Cost of an operation that does nothing: called from Python, and replayed with its barrier."""
    lib, call = library(), READ(None, 0, None)
    nothing = lib.operation("nothing")
    program = lib.program_new()
    for _ in range(1000):
        lib.program_add(program, nothing, ctypes.byref(call), ctypes.sizeof(call), 1, 1)
    replayed = seconds_of(lambda: lib.program_run(program, 1, 1), rounds) / 1000
    lib.program_free(program)
    x = torch.zeros(1, 64)
    return {
        "replayed_operation_ns": replayed * 1e9,
        "eager_operation_us": seconds_of(lambda: ops.add(x, x), rounds) * 1e6,
    }


def measure(rounds: int) -> dict[str, Any]:
    types = (torch.bfloat16, torch.float16, torch.float32)
    return {
        "overheads": time_overheads(rounds),
        "gemv": [row for dtype in types for row in time_gemv(dtype, rounds)],
        "gemm": [row for dtype in types for row in time_gemm(dtype, rounds)],
        "packed": [row for bits in (4, 8) for row in time_packed(bits, rounds)],
        "attention": [row for dtype in types for row in time_attention(dtype, rounds)],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{row[c]:.2f}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns] for row in rows
    ]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, *cells]:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def check(isa: str) -> dict[str, Any]:
    """The test modules with this instruction set."""
    modules = ["tests/kernels/test_cpu_kernels.py", "tests/kernels/cpu/test_packed.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules]
    environment = {**os.environ, "QUIRE_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "summary": lines[-1] if lines else done.stderr[-300:], "failures": failures}


def run_isa(isa: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check here, measure in a process where this instruction set is forced."""
    result: dict[str, Any] = {"isa": isa, "check": check(isa)}
    print(f"\n== {isa}: {result['check']['summary']}", flush=True)
    for failure in result["check"]["failures"]:
        print(f"  {failure}")
    if options.no_timing:
        return result
    command = [sys.executable, __file__, "--measure", "--threads", str(options.threads)]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(
        command, env={**os.environ, "QUIRE_CPU_ISA": isa}, stdout=subprocess.PIPE, text=True, check=True
    )
    result["measured"] = json.loads(done.stdout)
    for part in ("gemv", "gemm", "packed", "attention"):
        print(f"-- {part}")
        print_table(result["measured"][part])
    print("-- overheads:", ", ".join(f"{name} {value:.2f}" for name, value in result["measured"]["overheads"].items()))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="*", help="instruction sets (default: all that this machine runs)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    available, isa, reason = cpu.library_status()
    if not available:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    cpu.register()
    ops.select("cpu")
    cpu.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    if options.measure:
        json.dump(measure(2 if options.quick else 7), sys.stdout)
        return 0
    print(f"{options.threads} threads; best instruction set {isa}; can run {', '.join(library().isas)}")
    results = [run_isa(each, options) for each in options.isa or library().isas]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(result["check"]["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
