"""One row times whole codes (`packed_vector`), with what a layer does around it: correctness, then times by blocks.

`python3 tools/gpu/packed_vector.py` with PYTHONPATH=src. Prints tables; writes $OUT/packed_vector.json. Times are of the
matrices of several layers one after another in a CUDA graph, norms, activation and residual included, so that the cache holds
none of them. Kernels are compiled by several processes first. Without a GPU (TRITON_INTERPRET=1) small matrices are checked,
and nothing is timed.
"""

import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))
from packed import DEVICE, LAYERS, SMALL, microseconds, packed_weight
from tests.oracles.operations import packed as reference

from quire.kernels import ops, triton
from quire.kernels.triton.packed import matmul as kernels
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.triton.packed.vector import VectorConfig
from quire.kernels.types import PackedWeight

EPS = 1e-5
BOUND = 2.0**-5 if SMALL else 2.0**-6
"""Of errors: what rounding to bfloat16 explains, which the interpreter cuts off."""
SHAPES = {"qkv": (192, 1024), "gate_up": (128, 1024)} if SMALL else {
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
"""Llama-3.1-8B's."""
FORMS: dict[str, dict[str, Any]] = {
    "int4, 128": {"bits": 4, "group": 128, "zeros": True},
    "int4, 64": {"bits": 4, "group": 64, "zeros": True},
}
ROWS = (1,)


def knobs_of(name: str) -> list[VectorConfig | None]:
    """Blocks for a matrix; None: on the tensor cores."""
    if SHAPES[name][1] > packed_vector.MAX_COLUMNS:
        return [None]
    return [None, *(VectorConfig(*each) for each in itertools.product((2, 4), (4, 8)))]


COMPILERS = 14
CHOOSE = packed_vector.choose
RESULTS: dict[str, Any] = {"errors": {}, "blocks": {}, "microseconds": {}}


def set_knobs(chosen: dict[str, VectorConfig | None]) -> None:
    """Blocks by matrix."""
    by_shape = {SHAPES[name]: config for name, config in chosen.items()}
    packed_vector.choose = lambda weight, rows: by_shape[weight.out_features, weight.in_features]  # type: ignore[assignment]


def inputs_of(rows: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    """(x, norm, out, narrow out, scratches of x and out)."""
    x_TK = torch.randn(rows, k, device=DEVICE).bfloat16()
    wide = [torch.zeros(rows, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    narrow = torch.zeros(rows, n // 2, device=DEVICE, dtype=torch.bfloat16)
    return x_TK, torch.rand(k, device=DEVICE) + 0.5, wide[0], narrow, torch.empty_like(x_TK), wide[1]


def multiply(name: str, weight: PackedWeight, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x_TK, norm_K, out_TN, narrow_TI, scratch_TK, scratch_TN = given
    if name == "gate_up":
        kernels.packed_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", narrow_TI, scratch_TK, scratch_TN)
        return narrow_TI
    if name == "qkv":
        ops.rms_norm(x_TK, norm_K, EPS, scratch_TK)
        kernels.packed_linear(scratch_TK, weight, out_TN)
    else:
        kernels.packed_linear_add(x_TK, weight, out_TN)
    return out_TN


def check() -> None:
    """Every matrix and block against the reference."""
    for (form, fields), (name, (n, k)), rows in itertools.product(FORMS.items(), SHAPES.items(), ROWS):
        weight = packed_weight(n, k, **fields)
        ready = kernels.pack_codes(weight)
        given = inputs_of(rows, k, n)
        x_TK, norm_K, _, _, scratch_TK, scratch_TN = given
        expected = torch.zeros(rows, n, device=DEVICE)
        if name == "gate_up":
            expected = torch.empty(rows, n // 2, device=DEVICE)
            reference.packed_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", expected, scratch_TK, scratch_TN)
        elif name == "qkv":
            ops.rms_norm(x_TK, norm_K, EPS, scratch_TK)
            reference.packed_linear(scratch_TK, weight, expected)
        else:
            reference.packed_linear(x_TK, weight, expected)
        for config in knobs_of(name):
            set_knobs({name: config})
            given[2].zero_()
            got = multiply(name, ready, given).float()
            error = float((got - expected).norm() / expected.norm())
            key = f"{form}, {name}, {rows} rows"
            RESULTS["errors"][key] = max(error, RESULTS["errors"].get(key, 0.0))
    wrong = {key: error for key, error in RESULTS["errors"].items() if not error < BOUND}
    print(f"worst relative error {max(RESULTS['errors'].values()):.5f}; wrong: {wrong or 'none'}", flush=True)


def timed(layers: list[dict[str, PackedWeight]], rows: int, names: Any = SHAPES) -> float:
    """Microseconds of a layer, or of some of its matrices."""
    given = {name: inputs_of(rows, k, n) for name, (n, k) in SHAPES.items()}

    def run() -> None:
        for layer in layers:
            for name in names:
                multiply(name, layer[name], given[name])

    return microseconds(run, LAYERS)


def time_knobs() -> None:
    """Each matrix by itself over all blocks; a layer with the best of each; with the chosen blocks; on the tensor cores."""
    for form, rows in itertools.product(FORMS, ROWS):
        fields = FORMS[form]
        layers = [
            {name: kernels.pack_codes(packed_weight(n, k, **fields)) for name, (n, k) in SHAPES.items()}
            for _ in range(LAYERS)
        ]
        best: dict[str, VectorConfig | None] = {}
        for name in SHAPES:
            times: list[tuple[float, str, VectorConfig | None]] = []
            for config in knobs_of(name):
                set_knobs({name: config})
                label = f"{config.eights}x{config.warps}" if config else "tiles"
                times.append((timed(layers, rows, [name]), label, config))
            ranked = sorted(times, key=lambda each: each[0])
            best[name] = ranked[0][2]
            RESULTS["blocks"][f"{form}, {name}, {rows} rows"] = [each[:2] for each in times]
            told = ", ".join(f"{label} {time:.2f}" for time, label, _ in ranked[:7])
            print(f"{form:9} {name:8} {rows} rows: tiles {times[0][0]:.2f}, best {told}", flush=True)
        set_knobs(dict.fromkeys(SHAPES))
        taken = {"tiles": timed(layers, rows)}
        set_knobs(best)
        taken["best"] = timed(layers, rows)
        packed_vector.choose = CHOOSE
        taken["chosen"] = timed(layers, rows)
        RESULTS["microseconds"][f"{form}, {rows} rows"] = taken
        print(f"{form:9} {rows} rows, µs a layer: {taken}", flush=True)


def compile_share(number: int) -> None:
    """A process's part of all blocks, launched once."""
    triton.register()
    ops.select("cuda")
    for form, (name, (n, k)) in itertools.product(FORMS, SHAPES.items()):
        weight = kernels.pack_codes(packed_weight(n, k, **FORMS[form]))
        for rows, config in list(itertools.product(ROWS, knobs_of(name)))[number::COMPILERS]:
            set_knobs({name: config})
            multiply(name, weight, inputs_of(rows, k, n))


def main() -> None:
    if not SMALL:
        with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
            pool.map(compile_share, range(COMPILERS))
    triton.register()
    ops.select("cuda")
    torch.manual_seed(0)
    check()
    if not SMALL:
        RESULTS["device"] = torch.cuda.get_device_name()
        time_knobs()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "packed_vector.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
