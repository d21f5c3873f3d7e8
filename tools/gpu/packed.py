"""Packed, float8-coded and int8 products on one GPU: correctness against the references, then times beside bfloat16.

`python3 tools/gpu/packed.py` with PYTHONPATH=src. Prints tables; writes $OUT/packed.json. Products are timed as a decoder runs
them: the matrices of several layers one after another in a CUDA graph, so that the cache holds none of them. Without a GPU
(TRITON_INTERPRET=1) small matrices are checked, and nothing is timed.
"""

import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.oracles.operations import packed as reference

from quire.kernels import ops
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.linear import matmul as plain
from quire.kernels.triton.packed import matmul as kernels
from quire.kernels.triton.packed import tiles as packed_tiles
from quire.kernels.types import Int8Weight, LinearWeight, PackedWeight

SMALL = interpreted()
if SMALL:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.oracles.interpreter import repair_interpreter

    repair_interpreter()
DEVICE = torch.device("cpu" if SMALL else "cuda")
SHAPES = {"small": (96, 128)} if SMALL else {
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
"""Llama-3.1-8B's."""
EPS = 1e-5
CHECKED_ROWS = (1, 3) if SMALL else (1, 2, 4, 5, 17, 64, 300)
TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
LAYERS = 6
RESULTS: dict[str, Any] = {}


def packed_weight(n: int, k: int, bits: int, group: int, *, zeros: bool = False, table: str = "") -> PackedWeight:
    codes = torch.randint(0, 256, (n, k // 2), device=DEVICE).to(torch.uint8)
    if bits == 8:
        codes = torch.randint(-128, 128, (n, k), device=DEVICE).to(torch.int8)
    scale = (torch.rand(n, k // group, device=DEVICE) + 0.5).half().float() * 2.0**-8
    zero = torch.randint(0, 16, scale.shape, device=DEVICE).float() if zeros else None
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = {"": None, "e2m1": torch.tensor([*e2m1, *(-value for value in e2m1)]), "any": torch.linspace(-1, 1, 16)}[
        table
    ]
    return PackedWeight(
        n, k, torch.bfloat16, codes, scale=scale, zero=zero, table=None if values is None else values.to(DEVICE)
    )


def float8_weight(n: int, k: int) -> PackedWeight:
    codes = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
    return PackedWeight(n, k, torch.bfloat16, codes, scale=torch.ones(n, k // 128, device=DEVICE))


def int8_weight(n: int, k: int) -> Int8Weight:
    codes = torch.randint(-128, 128, (n, k), device=DEVICE).to(torch.int8)
    return Int8Weight(n, k, torch.bfloat16, codes, scale=torch.rand(n, device=DEVICE) * 0.01)


def bfloat16_weight(n: int, k: int) -> LinearWeight:
    return plain.pack_linear(torch.randn(n, k, device=DEVICE).bfloat16())


def prepared(weight: Any) -> Any:
    """As the kernels want it."""
    if isinstance(weight, PackedWeight):
        return kernels.pack_codes(weight)
    return kernels.pack_int8(weight) if isinstance(weight, Int8Weight) else weight


FORMS: dict[str, tuple[Callable[[int, int], Any], Callable[..., None]]] = {
    "bfloat16": (bfloat16_weight, plain.linear),
    "int4, 128": (lambda n, k: packed_weight(n, k, 4, 128, zeros=True), kernels.packed_linear),
    "int4, 64": (lambda n, k: packed_weight(n, k, 4, 64, zeros=True), kernels.packed_linear),
    "int4, 32": (lambda n, k: packed_weight(n, k, 4, 32, zeros=True), kernels.packed_linear),
    "e2m1, 32": (lambda n, k: packed_weight(n, k, 4, 32, table="e2m1"), kernels.packed_linear),
    "table, 32": (lambda n, k: packed_weight(n, k, 4, 32, table="any"), kernels.packed_linear),
    "int8, 128": (lambda n, k: packed_weight(n, k, 8, 128), kernels.packed_linear),
    "float8, 128": (float8_weight, kernels.packed_linear),
    "int4, 128, invariant": (
        lambda n, k: packed_weight(n, k, 4, 128, zeros=True),
        functools.partial(kernels.packed_linear, is_invariant=True),
    ),
    "int8 by int8": (int8_weight, kernels.int8_linear),
}


def inputs_of(rows: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    """(x, norm, out, narrow out, scratches of x and out)."""
    x_TK = torch.randn(rows, k, device=DEVICE).bfloat16()
    wide = [torch.zeros(rows, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    narrow = torch.zeros(rows, n // 2, device=DEVICE, dtype=torch.bfloat16)
    return x_TK, torch.rand(k, device=DEVICE) + 0.5, wide[0], narrow, torch.empty_like(x_TK), wide[1]


def multiply(name: str, weight: PackedWeight, given: tuple[torch.Tensor, ...], module: Any = kernels) -> torch.Tensor:
    """One product by a module's operations, with what a layer does around it."""
    x_TK, norm_K, out_TN, narrow_TI, scratch_TK, scratch_TN = given
    if name == "gate_up":
        module.packed_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", narrow_TI, scratch_TK, scratch_TN)
        return narrow_TI
    if name == "qkv":
        ops.rms_norm(x_TK, norm_K, EPS, scratch_TK)
        module.packed_linear(scratch_TK, weight, out_TN)
    else:
        module.packed_linear_add(x_TK, weight, out_TN)
    return out_TN


def check() -> None:
    """Every form against its reference; what rounding values and results to bfloat16 explains is below 2^-7."""
    for name, (make, multiply) in FORMS.items():
        if name == "bfloat16":
            continue
        worst = 0.0
        for n, k in SHAPES.values():
            weight = make(n, k)
            ready = prepared(weight)
            exact = reference.int8_linear if isinstance(weight, Int8Weight) else reference.packed_linear
            for rows in CHECKED_ROWS:
                x = torch.randn(rows, k, device=DEVICE).bfloat16()
                got = torch.full((rows, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
                expected = torch.empty(rows, n, device=DEVICE)
                multiply(x, ready, got)
                exact(x, weight, expected)
                worst = max(worst, float((got.float() - expected).norm() / expected.norm()))
        RESULTS.setdefault("errors", {})[name] = worst
        print(f"{name}: relative error {worst:.5f}{'' if worst < 2.0**-7 else '  WRONG'}", flush=True)


def microseconds(run: Callable[[], Any], count: int = 1) -> float:
    """Of one of `count` parts of `run`, captured in a graph; the median of several replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def num_bytes(weight: Any) -> int:
    parts = (weight.data, weight.packed, getattr(weight, "scale", None), getattr(weight, "zero", None))
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def time_forms() -> None:
    """A layer's four products, by form and rows, and how fast a single row reads its weights."""
    print(f"{'':24}" + "".join(f"{rows:>9}" for rows in TIMED_ROWS) + "   µs a layer")
    for name, (make, multiply) in FORMS.items():
        layers = [[prepared(make(n, k)) for n, k in SHAPES.values()] for _ in range(LAYERS)]
        taken = []
        for rows in TIMED_ROWS:
            inputs = {k: torch.randn(rows, k, device=DEVICE).bfloat16() for _, k in SHAPES.values()}
            outputs = {n: torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n, _ in SHAPES.values()}

            def run(
                layers: Any = layers, multiply: Any = multiply, inputs: Any = inputs, outputs: Any = outputs
            ) -> None:
                for weights in layers:
                    for weight in weights:
                        multiply(inputs[weight.in_features], weight, outputs[weight.out_features])

            taken.append(microseconds(run, LAYERS))
        read = sum(num_bytes(weight) for weight in layers[0]) / taken[0] / 1e3
        RESULTS.setdefault("microseconds", {})[name] = dict(zip(TIMED_ROWS, taken, strict=True))
        RESULTS.setdefault("gb_s_of_one_row", {})[name] = read
        print(
            f"{name:24}" + "".join(f"{each:9.1f}" for each in taken) + f"   one row reads {read:.0f} GB/s", flush=True
        )
        del layers
        torch.cuda.empty_cache()


def tune() -> None:
    """Stages and programs of a multiprocessor, for a few numbers of rows."""
    layers = [[prepared(packed_weight(n, k, 4, 128, zeros=True)) for n, k in SHAPES.values()] for _ in range(LAYERS)]
    began = dict(packed_tiles.STAGES), dict(packed_tiles.PROGRAMS)
    only = os.environ.get("TUNE", "all")  # or one of them alone, to compile several at a time
    variants = ((2, 12), (3, 6), (3, 8), (3, 12), (3, 16), (4, 2), (4, 4), (4, 6), (4, 8))
    for rows in (1, 16):
        inputs = {k: torch.randn(rows, k, device=DEVICE).bfloat16() for _, k in SHAPES.values()}
        outputs = {n: torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n, _ in SHAPES.values()}
        for number, (stages, programs) in enumerate(variants):
            if only not in ("all", str(number)):
                continue
            packed_tiles.STAGES = dict.fromkeys((8, 16, 32, 64), stages)
            packed_tiles.PROGRAMS = dict.fromkeys((8, 16, 32, 64), programs)

            def run(inputs: Any = inputs, outputs: Any = outputs) -> None:
                for weights in layers:
                    for weight in weights:
                        kernels.packed_linear(inputs[weight.in_features], weight, outputs[weight.out_features])

            taken = microseconds(run, LAYERS)
            RESULTS.setdefault("tuning", []).append((rows, stages, programs, taken))
        tuned = sorted((row for row in RESULTS["tuning"] if row[0] == rows), key=lambda row: row[-1])
        print(f"{rows} rows (stages, programs, µs a layer): {[row[1:] for row in tuned]}", flush=True)
    packed_tiles.STAGES, packed_tiles.PROGRAMS = began


def main() -> None:
    torch.manual_seed(0)
    if "TUNE" not in os.environ:
        check()
    if not SMALL:
        RESULTS["device"] = torch.cuda.get_device_name()
        if "TUNE" not in os.environ:
            time_forms()
        tune()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "packed.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
