"""A decode step's products of packed weights, fused (`packed_rows`) and one by one: correctness, then times by blocks.

`python3 tools/gpu/packed_rows.py` with PYTHONPATH=src. Prints tables; writes $OUT/packed_rows.json. Times are of the matrices of
several layers one after another in a CUDA graph, with what a layer does around them (norm, activation, residual), so that the
cache holds none of them. Kernels are compiled by several processes first. Without a GPU (TRITON_INTERPRET=1) small matrices
are checked, and nothing is timed.
"""

import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))
from packed import DEVICE, LAYERS, SMALL, microseconds, packed_weight

from quire.kernels import ops, triton
from quire.kernels.packed import PackedWeight
from quire.kernels.reference import packed as reference
from quire.kernels.triton import packed as kernels
from quire.kernels.triton import packed_rows
from quire.kernels.triton.packed_rows import RowsConfig, choose, launch_packed_rows

EPS = 1e-5
SHAPES = {"qkv": (96, 128), "gate_up": (128, 128)} if SMALL else {
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
"""Llama-3.1-8B's."""
FORMS: dict[str, dict[str, Any]] = {
    "int4, 128": {"bits": 4, "group": 128, "zeros": True},
    "int4, 64": {"bits": 4, "group": 64, "zeros": True},
    "e2m1, 32": {"bits": 4, "group": 32, "table": "e2m1"},
    "table, 64": {"bits": 4, "group": 64, "table": "any"},
    "int8, 128": {"bits": 8, "group": 128},
}
CONFIGS = [
    RowsConfig(*each)
    for each in itertools.product(*(((16, 32), (4,), (3,)) if SMALL else ((16, 32, 64), (4, 8, 16), (3, 4))))
]
ROOM = 225 << 10
"""Bytes of shared memory that a program may have, about."""
COMPILERS = 12
RESULTS: dict[str, Any] = {"errors": {}, "blocks": {}, "microseconds": {}}


def inputs_of(rows: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    """(x, norm, out, narrow out, scratches of x and out)."""
    x_TK = torch.randn(rows, k, device=DEVICE).bfloat16()
    wide = [torch.zeros(rows, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    narrow = torch.zeros(rows, n // 2, device=DEVICE, dtype=torch.bfloat16)
    return x_TK, torch.rand(k, device=DEVICE) + 0.5, wide[0], narrow, torch.empty_like(x_TK), wide[1]


def configs_of(name: str) -> list[RowsConfig]:
    """Blocks whose tiles have room."""
    matrices = 2 if name == "gate_up" else 1
    return [
        config for config in CONFIGS
        if (config.stages - 1) * config.shares * (matrices * config.block_n * 72 + 2560) < ROOM
    ]  # fmt: skip


def fused(name: str, weight: PackedWeight, given: tuple[torch.Tensor, ...], config: RowsConfig) -> torch.Tensor:
    x_TK, norm_K, out_TN, narrow_TI, _, _ = given
    if name == "gate_up":
        launch_packed_rows(x_TK, weight, narrow_TI, config, norm_K=norm_K, eps=EPS, kind="silu")
        return narrow_TI
    if name == "qkv":
        launch_packed_rows(x_TK, weight, out_TN, config, norm_K=norm_K, eps=EPS)
    else:
        launch_packed_rows(x_TK, weight, out_TN, config, add=True)
    return out_TN


def one_by_one(name: str, weight: PackedWeight, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x_TK, norm_K, out_TN, narrow_TI, scratch_TK, scratch_TN = given
    if name == "gate_up":
        kernels.packed_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", narrow_TI, scratch_TK, scratch_TN)
        return narrow_TI
    if name == "qkv":
        kernels.packed_norm_linear(x_TK, norm_K, EPS, weight, out_TN, scratch_TK)
    else:
        kernels.packed_linear_add(x_TK, weight, out_TN)
    return out_TN


def check() -> None:
    """Every form, matrix and block against the reference; what rounding to bfloat16 explains is below 2^-6."""
    for (form, fields), (name, (n, k)) in itertools.product(FORMS.items(), SHAPES.items()):
        weight = packed_weight(n, k, **fields)
        ready = kernels.pack_codes(weight)
        for rows in (1, 3, 8):
            given = inputs_of(rows, k, n)
            x_TK, norm_K, _, _, scratch_TK, scratch_TN = given
            expected = torch.zeros(rows, n, device=DEVICE)
            if name == "gate_up":
                expected = torch.empty(rows, n // 2, device=DEVICE)
                reference.packed_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", expected, scratch_TK, scratch_TN)
            elif name == "qkv":
                reference.packed_norm_linear(x_TK, norm_K, EPS, weight, expected, scratch_TK)
            else:
                reference.packed_linear(x_TK, weight, expected)
            for config in [each for each in configs_of(name) if form == "int4, 128" or each.block_n == 32]:
                given[2].zero_()
                got = fused(name, ready, given, config).float()
                error = float((got - expected).norm() / expected.norm())
                key = f"{form}, {name}, {rows} rows"
                RESULTS["errors"][key] = max(error, RESULTS["errors"].get(key, 0.0))
    wrong = {key: error for key, error in RESULTS["errors"].items() if not error < 2.0**-6}
    print(f"worst relative error {max(RESULTS['errors'].values()):.5f}; wrong: {wrong or 'none'}", flush=True)


def time_blocks(form: str, rows: int) -> None:
    """Each matrix by itself, over all blocks."""
    for name, (n, k) in SHAPES.items():
        layers = [kernels.pack_codes(packed_weight(n, k, **FORMS[form])) for _ in range(LAYERS)]
        given = inputs_of(rows, k, n)

        def timed(multiply: Callable[[PackedWeight], Any], layers: Any = layers) -> float:
            def run() -> None:
                for weight in layers:
                    multiply(weight)

            return microseconds(run, LAYERS)

        before = timed(lambda weight, name=name, given=given: one_by_one(name, weight, given))
        taken = [
            (timed(lambda weight, name=name, given=given, config=config: fused(name, weight, given, config)), config)
            for config in configs_of(name)
        ]
        best = sorted(taken, key=lambda each: each[0])
        chosen = choose(layers[0], is_gated=name == "gate_up")
        RESULTS["blocks"][f"{form}, {name}, {rows} rows"] = {
            "one by one": before, "chosen": str(chosen), "fused": [(time, str(config)) for time, config in best],
        }  # fmt: skip
        told = ", ".join(f"{c.block_n}x{c.shares}x{c.stages} {time:.2f}" for time, c in best[:4])
        mine = next((time for time, config in taken if config == chosen), float("nan"))
        print(f"{form:10} {name:8} {rows} rows: one by one {before:.2f}, chosen {mine:.2f}, best {told}", flush=True)


def time_layers() -> None:
    """A layer's four products and what is around them, both ways, with the blocks that are chosen."""
    for form, fields in FORMS.items():
        layers = [
            {name: kernels.pack_codes(packed_weight(n, k, **fields)) for name, (n, k) in SHAPES.items()}
            for _ in range(LAYERS)
        ]
        for rows in (1, 2, 4, 8):
            given = {name: inputs_of(rows, k, n) for name, (n, k) in SHAPES.items()}

            def run(few: int, layers: Any = layers, given: Any = given) -> None:
                kernels.FEW_ROWS = few
                for layer in layers:
                    for name, weight in layer.items():
                        one_by_one(name, weight, given[name])
                kernels.FEW_ROWS = 0

            both = [microseconds(lambda few=few, run=run: run(few), LAYERS) for few in (0, packed_rows.MAX_ROWS)]
            RESULTS["microseconds"][f"{form}, {rows} rows"] = both
            print(f"{form:10} {rows} rows, µs a layer: {both[0]:.1f} one by one, {both[1]:.1f} fused", flush=True)


def compile_share(number: int) -> None:
    """A process's part of all blocks, launched once."""
    triton.register()
    ops.select("cuda")
    work = [(name, config) for name in SHAPES for config in configs_of(name)]
    for name, config in work[number::COMPILERS]:
        n, k = SHAPES[name]
        fused(name, kernels.pack_codes(packed_weight(n, k, **FORMS["int4, 128"])), inputs_of(1, k, n), config)


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
        for rows in (1, 8):
            time_blocks("int4, 128", rows)
        time_layers()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "packed_rows.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
