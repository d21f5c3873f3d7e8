"""Mixtures of experts on a GPU: every kernel against the reference at the shape of Qwen3-30B-A3B, then times of many ways to cut
the work, as CUDA graphs over several layers whose weights no cache holds.

    PYTHONPATH=src python3 tools/gpu/moe.py [--quick]

Prints a table; writes moe.json into $OUT (or the current folder).
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from packed import DEVICE, SMALL, microseconds
from tests.oracles.operations import experts as reference

from quire.kernels import ops
from quire.kernels.triton.experts import configs as moe_configs  # noqa: F401
from quire.kernels.triton.experts import mixture as moe
from quire.kernels.triton.experts.configs import FewConfig
from quire.kernels.triton.experts.few import launch_few_down, launch_few_gate_up
from quire.kernels.triton.experts.grouped import GroupedConfig, launch_combine, launch_grouped
from quire.kernels.triton.experts.route import launch_choose, launch_lists
from quire.kernels.triton.linear import matmul as linear  # noqa: F401
from quire.kernels.triton.norm import (
    activations,  # noqa: F401
    norms,  # noqa: F401
)
from quire.kernels.types import ExpertScratch, ExpertWeights, LinearWeight, Routing

HIDDEN, EXPERTS, TOP_K, WIDTH = (64, 8, 2, 32) if SMALL else (2048, 128, 8, 768)
LAYERS, CAPACITY, EPS = 8, 64 if SMALL else 16384, 1e-6
ROUTING = Routing(EXPERTS, TOP_K)
invariant_norm_moe = functools.partial(moe.norm_moe, is_invariant=True)
BYTES_A_SECOND, FLOPS_A_SECOND = 4.24e12, 784e12

GATE_UPS = [
    FewConfig(n, k, warps, 8, 1024, 8)
    for n, k, warps in (
        (2, 512, 2), (4, 512, 2), (8, 512, 2), (4, 256, 1), (8, 256, 1), (4, 512, 1), (8, 1024, 4), (4, 1024, 2), (4, 1024, 4),
        (8, 1024, 2),
    )
]  # fmt: skip
DOWNS = [
    FewConfig(4, 512, 2, n, k, warps)
    for n, k, warps in (
        (4, 2048, 4), (8, 1024, 8), (8, 2048, 8), (8, 512, 2), (8, 512, 4), (4, 512, 2), (16, 512, 4), (4, 1024, 2),
    )
]  # fmt: skip
WALKS = [
    GroupedConfig(True, True, *blocks)
    for blocks in (
        (16, 128, 128, 3, 4), (16, 128, 64, 6, 4), (16, 64, 256, 2, 4), (16, 64, 128, 3, 4), (16, 64, 128, 5, 4),
        (16, 256, 64, 4, 8), (32, 128, 64, 3, 4), (32, 128, 64, 4, 4), (32, 128, 64, 5, 4), (32, 64, 128, 3, 4),
        (32, 64, 128, 4, 4), (32, 64, 64, 6, 4), (32, 256, 64, 3, 8), (32, 256, 64, 4, 8), (64, 128, 64, 3, 4),
        (64, 128, 64, 4, 4), (64, 256, 64, 3, 8), (64, 256, 64, 4, 8),
    )
] + [
    GroupedConfig(False, True, *blocks)
    for blocks in ((32, 128, 64, 4, 4), (64, 128, 64, 3, 4), (64, 128, 64, 4, 4), (64, 256, 64, 4, 8), (64, 128, 128, 3, 4))
]  # fmt: skip
TILES = [
    GroupedConfig(False, False, 64, 256, 64, 4, 8),
    GroupedConfig(False, False, 64, 256, 64, 3, 4),
    GroupedConfig(False, False, 128, 128, 64, 3, 4),
    GroupedConfig(False, False, 128, 128, 64, 4, 8),
    GroupedConfig(False, False, 128, 256, 64, 3, 8),
    GroupedConfig(False, False, 128, 256, 64, 4, 8),
    GroupedConfig(True, False, 128, 128, 64, 4, 8),
    GroupedConfig(True, False, 128, 256, 64, 3, 8),
    GroupedConfig(True, False, 64, 128, 64, 4, 4),
    GroupedConfig(False, True, 128, 256, 64, 3, 8),
]
BULK_WALKS = [
    GroupedConfig(True, True, *blocks, True)
    for blocks in (
        (16, 128, 128, 2, 4), (16, 128, 128, 3, 4), (16, 128, 64, 5, 4), (16, 128, 64, 6, 4), (16, 256, 64, 3, 4),
        (16, 256, 128, 2, 4), (32, 128, 64, 3, 4), (32, 128, 64, 4, 4), (32, 128, 64, 5, 4), (32, 128, 128, 3, 4),
        (32, 256, 64, 3, 4), (64, 128, 64, 3, 4), (64, 128, 64, 4, 4), (64, 256, 64, 3, 8),
    )
]  # fmt: skip
BULK_TILES = [
    GroupedConfig(False, False, 64, 256, 64, 4, 8, True),
    GroupedConfig(False, False, 64, 256, 64, 3, 4, True),
    GroupedConfig(False, False, 128, 128, 64, 4, 4, True),
    GroupedConfig(False, False, 128, 256, 64, 3, 8, True),
    GroupedConfig(False, False, 128, 256, 64, 4, 8, True),
    GroupedConfig(True, False, 128, 128, 64, 4, 8, True),
    GroupedConfig(True, False, 128, 256, 64, 3, 8, True),
    GroupedConfig(True, True, 128, 128, 64, 4, 4, True),
    GroupedConfig(True, True, 128, 128, 64, 4, 8, True),
    GroupedConfig(True, True, 128, 256, 64, 3, 8, True),
]


def graph_us(function: Callable[[int], None]) -> float:
    """Microseconds a layer."""
    return microseconds(lambda: [function(layer) for layer in range(LAYERS)] and None, LAYERS)


class Bench:
    """Weights of several layers, and the room to run them."""

    def __init__(self, layers: int = LAYERS) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
            return drawn.mul_(shape[-1] ** -0.5)

        self.experts = [
            ExpertWeights(draw(EXPERTS, 2 * WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)) for _ in range(layers)
        ]
        self.routers = [ops.pack_linear(draw(EXPERTS, HIDDEN)) for _ in range(layers)]
        exact = cast(torch.Tensor, self.routers[0].data).float()
        self.exact_router = LinearWeight(EXPERTS, HIDDEN, torch.float32, exact)
        self.norm_D = torch.ones(HIDDEN, device=DEVICE)
        self.x_TD = draw(CAPACITY, HIDDEN).mul_(HIDDEN**0.5)
        self.normed_TD = torch.empty_like(self.x_TD)
        self.scratch = ExpertScratch(
            capacity=CAPACITY, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=WIDTH,
            dtype=torch.bfloat16, device=DEVICE,
        )  # fmt: skip
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []

    def shape(self, rows: int) -> torch.Tensor:
        return torch.tensor([rows, 1, 1, 1], device=DEVICE)

    def mixture(self, function: Callable[..., None], x_TD: torch.Tensor, num_tokens: torch.Tensor, layer: int) -> None:
        function(
            x_TD, self.norm_D, EPS, self.routers[layer], ROUTING, self.experts[layer], "silu", num_tokens,
            self.normed_TD[: len(x_TD)], self.scratch,
        )  # fmt: skip

    def expected(self, start_TD: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """The first layer's reference; logits in float32, as the kernels have them."""
        expected_TD = start_TD.clone()
        router, self.routers[0] = self.routers[0], self.exact_router
        self.mixture(reference.norm_moe, expected_TD, num_tokens, 0)
        self.routers[0] = router
        return expected_TD

    def check(self) -> None:
        """Fast and invariant ways against the reference; the invariant one against itself in other batches."""
        lines = []
        for rows, count in ((1, 1), (3, 3), (4, 2), (8, 8), (16, 11), (64, 64), (256, 250), (1024, 1000), (4096, 4096)):
            start = self.x_TD[:rows]
            num_tokens = self.shape(count)
            expected = self.expected(start[:count], num_tokens)
            scale = (expected - start[:count]).float().pow(2).mean().sqrt()
            for name, function in (("fast", moe.norm_moe), ("invariant", invariant_norm_moe)):
                try:
                    outs = []
                    for _ in range(2):
                        actual = start.clone()
                        self.scratch.out_PD.fill_(float("nan"))
                        self.scratch.activated_PI.fill_(float("nan"))
                        self.mixture(function, actual, num_tokens, 0)
                        outs.append(actual)
                    error = (outs[0][:count] - expected).float().abs()
                    # A token whose last expert is a near tie may choose another one.
                    bad = (error.amax(-1) > 0.1 * scale).float().mean().item()
                    padding = torch.equal(outs[0][count:], start[count:])
                    same = torch.equal(outs[0], outs[1])
                    clean = not self.scratch.counts_E.any().item()
                    ok = bad < 0.02 and padding and same and clean
                    lines.append(f"T {rows:5} {name:9} {'ok ' if ok else 'BAD'} mean error {error.mean() / scale:.4f} of rms, "
                                 f"rows off {bad:.4f}, padding {padding}, repeats {same}, clean {clean}")  # fmt: skip
                    if not ok:
                        self.failures.append(lines[-1])
                except Exception as error:
                    self.failures.append(f"T {rows} {name}: {type(error).__name__} {str(error)[:200]}")
                    self.scratch.counts_E.zero_()
        ops.select("cuda", deterministic=True)  # norms and logits are other operations' work
        whole = self.x_TD[:1000].clone()
        self.mixture(invariant_norm_moe, whole, self.shape(1000), 0)
        for first, last in ((0, 1), (5, 9), (100, 400)):
            part = self.x_TD[first:last].clone()
            self.mixture(invariant_norm_moe, part, self.shape(last - first), 0)
            if not torch.equal(part, whole[first:last]):
                self.failures.append(f"invariant: rows {first} to {last} depend on the batch")
        ops.select("cuda")
        print("\n".join(lines), flush=True)

    def limit_us(self, rows: int) -> float:
        """What the weights of the experts that were hit, or the arithmetic, cannot go below."""
        hit = self.scratch.ids_TK[:rows].unique().numel()
        bytes_read = hit * 3 * WIDTH * HIDDEN * 2
        return max(bytes_read / BYTES_A_SECOND, rows * TOP_K * 6 * WIDTH * HIDDEN / FLOPS_A_SECOND) * 1e6

    def sweep(self, group: str, rows: int, configs: list[Any], run: Callable[[Any, int], None]) -> None:
        """Time each configuration; remembers all, best first."""
        found: list[tuple[float, str]] = []
        for config in configs:
            try:
                found.append((graph_us(lambda layer, c=config: run(c, layer)), str(config)))
            except Exception as error:
                self.failures.append(f"{group} T {rows} {config}: {type(error).__name__} {str(error)[:120]}")
        self.results[f"{group} {rows}"] = sorted(found)

    def prepare_lists(self, rows: int) -> None:
        ids = torch.rand(rows, EXPERTS, device=DEVICE).argsort(-1)[:, :TOP_K].int().contiguous()
        self.scratch.ids_TK[:rows].copy_(ids)
        self.scratch.weights_TK[:rows].fill_(1 / TOP_K)
        self.scratch.counts_E.zero_()
        launch_lists(ids, self.shape(rows), self.scratch, 0, EXPERTS)

    def few(self, rows: int, gate_ups: list[FewConfig] = GATE_UPS, downs: list[FewConfig] = DOWNS) -> None:
        num_tokens, scratch = self.shape(rows), self.scratch
        x_TD, ids, weights = self.x_TD[:rows], scratch.ids_TK[:rows], scratch.weights_TK[:rows]
        scratch.logits_TE.normal_()

        def gate_up(config: FewConfig, layer: int) -> None:
            launch_few_gate_up(
                x_TD, self.norm_D, EPS, self.experts[layer], ROUTING, TOP_K, "silu", num_tokens, ids, weights, scratch,
                None, block_n=config.gate_up_n, block_k=config.gate_up_k, num_warps=config.gate_up_warps,
            )  # fmt: skip

        def down(config: FewConfig, layer: int) -> None:
            launch_few_down(
                self.experts[layer], num_tokens, ids, weights, x_TD, scratch, add=True,
                block_n=config.down_n, block_k=config.down_k, num_warps=config.down_warps,
            )  # fmt: skip

        self.sweep("few gate_up", rows, gate_ups, gate_up)
        self.sweep("few down", rows, downs, down)

    def grouped(self, rows: int, configs: list[GroupedConfig]) -> None:
        pairs, scratch = rows * TOP_K, self.scratch
        self.prepare_lists(rows)
        self.results[f"limit {rows}"] = self.limit_us(rows)

        def gate_up(config: GroupedConfig, layer: int) -> None:
            launch_grouped(
                self.x_TD, self.experts[layer].gate_up_E2ID, scratch.activated_PI, pairs, scratch, config,
                divisor=TOP_K, kind="silu",
            )  # fmt: skip

        def down(config: GroupedConfig, layer: int) -> None:
            launch_grouped(
                scratch.activated_PI, self.experts[layer].down_EDI, scratch.out_PD, pairs, scratch, config, divisor=1,
                weighted=True,
            )  # fmt: skip

        self.sweep("gate_up", rows, configs, gate_up)
        self.sweep("down", rows, configs, down)
        self.scratch.counts_E.zero_()

    def router(self, rows: int) -> None:
        num_tokens, scratch = self.shape(rows), self.scratch
        x_TD, normed_TD, logits_TE = self.x_TD[:rows], self.normed_TD[:rows], scratch.logits_TE[:rows]
        ids, weights = scratch.ids_TK[:rows], scratch.weights_TK[:rows]

        def combine(layer: int) -> None:
            launch_combine(x_TD, num_tokens, scratch, TOP_K, add=True)

        def run(layer: int) -> None:
            ops.rms_norm(x_TD, self.norm_D, EPS, normed_TD)
            ops.linear(normed_TD, self.routers[layer], logits_TE)
            launch_choose(logits_TE, ROUTING, num_tokens, ids, weights, None, scratch)
            combine(layer)

        scratch.out_PD.zero_()
        self.sweep("norm, linear, choose, combine", rows, ["all"], lambda _, layer: run(layer))
        self.sweep("combine", rows, ["combine"], lambda _, layer: combine(layer))
        scratch.counts_E.zero_()

    def whole(self, rows: int) -> None:
        """What the product does, and how long it takes."""
        num_tokens = self.shape(rows)
        for name, function in (("whole", moe.norm_moe), ("invariant", invariant_norm_moe)):
            self.sweep(
                name, rows, [name], lambda _, layer, f=function: self.mixture(f, self.x_TD[:rows], num_tokens, layer)
            )
        self.results[f"limit {rows}"] = self.limit_us(rows)
        self.x_TD.normal_()


_worker: Bench | None = None


def compile_one(job: tuple[str, Any]) -> str | None:
    """In a process of its own: launch once, so that the compiled kernel lies in Triton's cache."""
    global _worker
    if _worker is None:
        ops.select("cuda")
        _worker = Bench(layers=1)
    kind, config = job
    globals()["LAYERS"] = 1
    before = len(_worker.failures)
    try:
        if kind == "grouped":
            _worker.grouped(16, [config])
        elif kind == "few":
            _worker.few(2, [config], [config])
        else:
            _worker.whole(config)
    except Exception as error:
        return f"compile {job}: {type(error).__name__} {str(error)[:160]}"
    return "; ".join(_worker.failures[before:]) or None


def compile_all(jobs: list[tuple[str, Any]], seconds: float) -> list[str]:
    """Every job in some process; gives what failed."""
    failed: list[str] = []
    pool = concurrent.futures.ProcessPoolExecutor(
        max(2, min(12, (os.cpu_count() or 4) - 2)), mp_context=multiprocessing.get_context("spawn")
    )
    futures = [pool.submit(compile_one, job) for job in jobs]
    try:
        for future in concurrent.futures.as_completed(futures, timeout=seconds):
            error = future.result()
            if error:
                failed.append(error)
    except TimeoutError:
        failed.append("not everything was compiled beforehand")
    pool.shutdown(wait=False, cancel_futures=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no sweeps, only what is chosen today")
    parser.add_argument("--seconds", type=float, default=90)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    ops.select("cuda")
    sizes = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
    jobs: list[tuple[str, Any]] = [("whole", rows) for rows in (1, 8, 256, 512, 2048, 16384)]
    if not arguments.quick:
        jobs += [("grouped", config) for config in WALKS + BULK_WALKS + TILES + BULK_TILES]
        jobs += [("few", config) for config in GATE_UPS + DOWNS]
    failed = compile_all(jobs, 45)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    bench = Bench()
    bench.failures += failed
    work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(bench.check, ())]
    work += [(bench.whole, (rows,)) for rows in sizes]
    if not arguments.quick:
        work += [(bench.few, (rows,)) for rows in (1, 2, 4)]
        work += [(bench.router, (rows,)) for rows in (8, 256, 64, 512, 1024, 8192)]
        work += [(bench.grouped, (rows, WALKS + BULK_WALKS)) for rows in (256, 8, 192, 384)]
        work += [(bench.grouped, (rows, TILES + BULK_TILES)) for rows in (512, 640, 3072)]
    for function, values in work:
        if time.perf_counter() - begin > arguments.seconds:
            bench.failures.append(f"no time left for {function.__name__} {values[:1]}")
            continue
        try:
            function(*values)
        except Exception as error:
            bench.failures.append(f"{function.__name__} {values[:1]}: {type(error).__name__} {str(error)[:200]}")
        torch.cuda.synchronize()
    for name, found in bench.results.items():
        if isinstance(found, list) and found and name.split()[0] in ("whole", "invariant"):
            limit = bench.results.get(f"limit {name.split()[-1]}", 0.0)
            print(f"{name:18} {found[0][0]:8.1f} us (limit {limit:7.1f}, {limit / found[0][0]:.0%})")
    for name, found in bench.results.items():
        if isinstance(found, list) and name.split()[0] not in ("whole", "invariant"):
            best = "; ".join(f"{us:.1f} {config}" for us, config in itertools.islice(found, 2))
            print(f"{name:18} {best.replace('Config', '')}")
    for failure in bench.failures:
        print("FAILED", failure)
    out = Path(os.environ.get("OUT", "."))
    (out / "moe.json").write_text(json.dumps({"results": bench.results, "failures": bench.failures}, indent=1))
    print(f"moe: {time.perf_counter() - begin:.0f} s, {len(bench.failures)} failures")


if __name__ == "__main__":
    main()
