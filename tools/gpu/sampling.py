"""Check and time the elementwise and sampling kernels on this machine's GPU.

Every operation is compared with its reference first (the draws to the bit, also with the reference on the CPU); times are
of captured graphs over rotating buffers, so that the L2 cache does not hold what is read.

    python tools/gpu/sampling.py
"""
# ruff: noqa: B023, B905 - timed calls are made in the loop that defines them

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.oracles.operations import norm as elementwise
from tests.oracles.operations import sampling as reference

from quire.kernels import ops
from quire.kernels import triton as triton_kernels
from quire.kernels.step import SampleColumns, allocate_columns
from quire.kernels.triton.norm import activations, gather, norms
from quire.kernels.triton.sampling import draw as sampling
from quire.kernels.triton.sampling import filters, filters_window, logprobs, penalties
from quire.kernels.triton.sampling import heads as sampling_heads
from quire.platforms.interface import HostMemory
from quire.platforms.torch_gpu import PinnedMemory
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams

VOCABULARY = 151_936
LIMIT_SECONDS = float(os.environ.get("LIMIT", "52"))
DEVICE = torch.device("cuda")
CHECKS = ("check_elementwise", "check_draws", "check_filters", "check_logprobs", "check_penalties", "check_sampler")
TIMES = ("time_sampler", "time_draws", "time_filters", "time_penalties", "time_elementwise")
is_warming = False
results: dict[str, Any] = {}
started = time.monotonic()


def graph_of(functions: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph


def microseconds(functions: list[Callable[[], None]], budget_ms: float = 60.0) -> float:
    """Median time of one call, of graphs that hold all of them."""
    if is_warming:
        functions[0]()
        torch.cuda.synchronize()
        return 1.0
    copies = functions * max(1, 8 // len(functions))
    graph = graph_of(copies)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    spent = 0.0
    while spent < budget_ms and len(times) < 40:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end)
        times.append(begin.elapsed_time(end) / len(copies) * 1000)
    return sorted(times)[len(times) // 2]


def section(function: Callable[[], None]) -> None:
    """Run one part; its failure is printed and harms no other. Nothing starts when the time is up."""
    name = function.__name__
    if time.monotonic() - started > LIMIT_SECONDS:
        print(f"{name}: no time left")
        return
    try:
        function()
    except Exception as error:
        results[f"{name} failed"] = repr(error)[:500]
        print(f"{name} FAILED: {repr(error)[:300]}")
        traceback.print_exc(limit=-3, file=sys.stdout)


def report(name: str, time_us: float, num_bytes: float = 0) -> None:
    rate = f"  {num_bytes / time_us / 1e6:6.2f} TB/s" if num_bytes else ""
    results[name] = {"us": round(time_us, 2), "TB/s": round(num_bytes / time_us / 1e6, 3) if num_bytes else None}
    print(f"{name:58} {time_us:9.2f} us{rate}")


def same(name: str, is_same: bool, detail: str = "") -> None:
    results[f"correct: {name}"] = bool(is_same)
    if not is_same:
        print(f"WRONG {name} {detail}")


def check_elementwise() -> None:
    for rows, width in ((17, 4096), (300, 1000), (5, 130)):
        for dtype in (torch.bfloat16, torch.float32):
            x = (torch.randn(rows, width, device=DEVICE) * 3).to(dtype)
            weight, bias = torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)
            bound = 0.03 if dtype is torch.bfloat16 else 2e-5
            for op, extra in (("rms_norm", ()), ("layer_norm", (bias,))):
                pairs = []
                for module in (norms, elementwise):
                    out, residual = torch.full_like(x, float("nan")), x.flip(0).clone()
                    getattr(module, op)(x, weight, *extra, 1e-5, out, residual)
                    pairs.append((out, residual))
                same(
                    f"{op} {rows}x{width} {dtype}",
                    torch.equal(pairs[0][1], pairs[1][1])
                    and torch.allclose(pairs[0][0], pairs[1][0], atol=bound, rtol=bound),
                    str((pairs[0][0].float() - pairs[1][0].float()).abs().max()),
                )
            half = torch.empty(rows, width // 2, device=DEVICE, dtype=dtype)
            for kind in ("silu", "gelu", "gelu_tanh", "relu"):
                expected = torch.empty_like(half)
                activations.gated_activation(x, kind, half)
                elementwise.gated_activation(x, kind, expected)
                same(f"gated {kind} {rows}x{width} {dtype}", torch.allclose(half, expected, atol=bound, rtol=bound))
            part = torch.empty_like(x[: rows // 2 + 1])
            norms.rms_norm(x[: len(part)], weight, 1e-5, part)
            whole = torch.empty_like(x)
            norms.rms_norm(x, weight, 1e-5, whole)
            same(f"rms_norm invariant {rows}x{width}", torch.equal(part, whole[: len(part)]))
            capped, expected = x.float(), x.float()
            activations.scale_and_cap(capped, 0.3, 5.0)
            elementwise.scale_and_cap(expected, 0.3, 5.0)
            same(f"cap {rows}x{width}", torch.allclose(capped, expected, atol=1e-6, rtol=1e-5))
            index = torch.randint(0, rows, (rows * 2,), device=DEVICE, dtype=torch.int32)
            gathered = torch.empty(rows * 2, width, device=DEVICE, dtype=dtype)
            gather.gather_rows(x, index, gathered)
            same(f"gather {rows}x{width}", torch.equal(gathered, x[index.long()]))


def check_draws() -> None:
    generator = torch.Generator().manual_seed(1)
    for vocabulary in (VOCABULARY, 32_000, 1_025, 97):
        for levels in (1, 2, 0):
            rows = 16
            if levels:
                logits = torch.randint(0, levels, (rows, vocabulary), generator=generator).float()
            else:
                logits = torch.randn(rows, vocabulary, generator=generator) * 3
            inverse = torch.tensor([1.0, float("inf"), 0.5, 3.3, 100.0, 1.0, 0.7, 2.0] * 2)
            seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
            position = torch.randint(0, 2**40, (rows,), generator=generator)
            on_gpu = [x.to(DEVICE) for x in (logits, inverse, seed, position)]
            cpu = torch.empty(rows, dtype=torch.int32)
            ours, gpu = (torch.empty(rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
            sampling.gumbel_argmax(*on_gpu, ours)
            reference.gumbel_argmax(*on_gpu, gpu)
            reference.gumbel_argmax(logits, inverse, seed, position, cpu)
            same(f"gumbel {vocabulary} {levels} == GPU reference", torch.equal(ours, gpu), f"{ours} {gpu}")
            same(f"gumbel {vocabulary} {levels} == CPU reference", torch.equal(ours.cpu(), cpu), f"{ours} {cpu}")
            sampling.argmax(on_gpu[0], ours)
            reference.argmax(logits, cpu)
            same(f"argmax {vocabulary} {levels}", torch.equal(ours.cpu(), cpu))


def filter_columns(rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    def choose(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (rows,), generator=generator)]

    return [
        choose([1.0, 0.5, 2.0, float("inf")], torch.float32),
        choose([0, 0, 1, 5, 50, 700], torch.int32),
        choose([1.0, 0.9, 0.3, 0.999], torch.float32),
        choose([0.0, 0.0, 0.05, 0.7], torch.float32),
    ]


def check_filters() -> None:
    generator = torch.Generator().manual_seed(2)
    different = draws = 0
    for vocabulary in (VOCABULARY, 32_000, 97):
        for scale in (0.7, 2.0, 8.0):
            rows = 48
            logits = (torch.randn(rows, vocabulary, generator=generator) * scale).to(DEVICE)
            if scale == 8.0:
                logits = logits.round() + 0.0
            columns = [x.to(DEVICE) for x in filter_columns(rows, generator)]
            seed, position = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
            outs = []
            for module in (filters, reference):
                threshold = torch.full((rows,), float("nan"), device=DEVICE)
                out = torch.empty(rows, dtype=torch.int32, device=DEVICE)
                module.filtered_gumbel_argmax(logits, *columns, seed, position, threshold, out)
                outs.append((threshold, out))
            wrong = outs[0][0] != outs[1][0]
            # Where a cut by mass differs, it must be one of the neighbours in the order.
            for row in wrong.nonzero()[:, 0].tolist():
                low, high = sorted((outs[0][0][row].item(), outs[1][0][row].item()))
                between = int(((logits[row] >= low) & (logits[row] < high)).sum())
                different += 1
                by_mass = columns[2][row] < 1
                same(
                    f"filter {vocabulary} {scale} row {row}", bool(by_mass) and between <= 3, f"{between} {low} {high}"
                )
            draws += rows
            same(f"filtered draw {vocabulary} {scale}", torch.equal(outs[0][1][~wrong], outs[1][1][~wrong]))
    print(f"thresholds that differ by rounding: {different} of {draws}")
    results["thresholds that differ"] = [different, draws]


def check_logprobs() -> None:
    logits = torch.randn(40, VOCABULARY, device=DEVICE) * 2
    index = torch.randint(0, 40, (23,), device=DEVICE, dtype=torch.int32)
    tokens = torch.randint(0, VOCABULARY, (23,), device=DEVICE, dtype=torch.int32)

    for count in (0, 1, 20, 64):
        outs = []
        for module in (logprobs, reference):
            values = torch.empty(23, count + 1, device=DEVICE)
            ids, ranks = torch.empty_like(values, dtype=torch.int32), torch.empty(23, dtype=torch.int32, device=DEVICE)
            module.token_logprobs(logits, index, tokens, True, values, ids, ranks)
            outs.append((values, ids, ranks))
        same(
            f"logprobs {count}",
            torch.allclose(outs[0][0], outs[1][0], atol=2e-5)
            and torch.equal(outs[0][1], outs[1][1])
            and torch.equal(outs[0][2], outs[1][2]),
        )


def random_params(rng: random.Random) -> SamplingParams:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.5, 1.0]), "max_tokens": 99}
    maybe: dict[str, Any] = {
        "top_k": lambda: rng.choice([1, 20, 200, 5000]),
        "top_p": lambda: rng.choice([0.3, 0.9, 0.99]),
        "min_p": lambda: rng.choice([0.01, 0.2]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {rng.randrange(VOCABULARY): rng.uniform(-20, 20) for _ in range(40)},
        "allowed_token_ids": lambda: rng.sample(range(VOCABULARY), 2000),
        "bad_words_token_ids": lambda: [[rng.randrange(VOCABULARY)], [3, 4]][: rng.randrange(1, 3)],
        "logprobs": lambda: rng.choice([0, 5, 20, 100]),
    }
    params.update((name, value()) for name, value in maybe.items() if rng.random() < 0.3)
    return SamplingParams(**params)


def columns_of(sampler: Sampler, rows_S: np.ndarray, positions_S: np.ndarray, device: torch.device) -> SampleColumns:
    host = allocate_columns(len(rows_S), torch.device("cpu"))
    sampler.table.pack(rows_S, positions_S, host)
    return SampleColumns(*(getattr(host, field.name).to(device) for field in dataclasses.fields(host)))


def check_sampler() -> None:
    """The sampler on the device against the sampler on the CPU, over steps, and that it never waits for the device."""
    for mode in ("raw_logprobs", "processed_logprobs"):
        rng = random.Random(mode)
        rows = 24
        ours, theirs = (
            Sampler(rows, VOCABULARY, PinnedMemory(DEVICE), mode),
            Sampler(rows, VOCABULARY, HostMemory(), mode),
        )
        for row in range(rows):
            params, prompt = random_params(rng), rng.sample(range(VOCABULARY), 30 + 10 * row)
            for sampler in (ours, theirs):
                sampler.add_row(row, params, prompt, [], row)
        rows_S = np.arange(rows, dtype=np.int32)
        different = 0
        for step in range(4):
            positions_S = (30 + 10 * rows_S + step).astype(np.int32)
            logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(step)) * 3
            ops.select("cpu")
            tokens_S, cpu = torch.zeros(rows, dtype=torch.int32), torch.device("cpu")
            wanted, columns = theirs.wanted(rows_S, positions_S), columns_of(theirs, rows_S, positions_S, cpu)
            there = theirs.sample(logits.clone(), columns, rows_S, positions_S, wanted, tokens_S)
            expected, expected_S = theirs.finish(there, there.tensors), tokens_S.numpy()
            theirs.append_tokens(rows_S, expected_S, positions_S)
            ops.select("cuda")
            on_gpu, columns = logits.to(DEVICE), columns_of(ours, rows_S, positions_S, DEVICE)
            out = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
            wanted = ours.wanted(rows_S, positions_S)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            begin = time.perf_counter()
            sampled = ours.sample(on_gpu, columns, rows_S, positions_S, wanted, out)
            spent = time.perf_counter() - begin
            torch.cuda.set_sync_debug_mode("default")
            host = {name: tensor.cpu() for name, tensor in sampled.tensors.items()}
            logprobs = ours.finish(sampled, host)
            # The rows go on with what the CPU's sampler drew, so that one difference is counted once.
            ours.append_tokens(rows_S, expected_S, positions_S)
            wrong = np.flatnonzero(out.cpu().numpy() != expected_S).tolist()
            different += len(wrong)
            if wrong:
                print(f"{mode} step {step}: rows {wrong} differ: {[theirs.table.top_p_R[row] for row in wrong]}")
            same(f"sampler {mode} {step} errors", sampled.errors == there.errors)
            for row, entry in expected.items():
                mine = logprobs[row]
                is_close = row in wrong or np.allclose(mine.logprobs[0], entry.logprobs[0], atol=2e-4)
                same(
                    f"sampler {mode} {step} logprobs of row {row}",
                    bool(is_close) and (row in wrong or mine.ranks == entry.ranks),
                )
        same(f"sampler {mode} tokens", different <= 1, f"{different} tokens differ")
        print(f"{mode}: {different} of {4 * rows} tokens differ; the last step took the host {spent * 1e6:.0f} us")


def time_sampler() -> None:
    """What a step costs the host and the device, for rows with everything that is common."""
    ops.select("cuda")
    for name, params in (
        ("top-p", {"top_p": 0.95}),
        ("penalties", {"presence_penalty": 0.5, "repetition_penalty": 1.1}),
        ("logprobs", {"logprobs": 5}),
        ("all", {"top_p": 0.95, "top_k": 40, "presence_penalty": 0.5, "logit_bias": {5: 1.0}, "logprobs": 5}),
    ):
        for rows in (1, 256):
            sampler = Sampler(rows, VOCABULARY, PinnedMemory(DEVICE))
            for row in range(rows):
                sampler.add_row(row, SamplingParams(**params), list(range(500)), [], row)
            rows_S = np.arange(rows, dtype=np.int32)
            columns, wanted = columns_of(sampler, rows_S, rows_S, DEVICE), sampler.wanted(rows_S)
            logits, out = (
                torch.randn(rows, VOCABULARY, device=DEVICE) * 3,
                torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            )
            for _ in range(3):
                sampler.sample(logits, columns, rows_S, rows_S, wanted, out)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                sampler.sample(logits, columns, rows_S, rows_S, wanted, out)
            host = (time.perf_counter() - begin) / 20
            torch.cuda.synchronize()
            whole = (time.perf_counter() - begin) / 20
            results[f"sampler {name} {rows}"] = {"host us": host * 1e6, "us": whole * 1e6}
            print(f"Sampler.sample {name}, {rows} rows: host {host * 1e6:.0f} us, with the device {whole * 1e6:.0f} us")


def seen_tables(rows: int, seen: int) -> tuple[torch.Tensor, ...]:
    capacity = seen + 64
    ids = torch.stack([torch.randperm(VOCABULARY, device=DEVICE)[:capacity] for _ in range(rows)]).int()
    counts = torch.randint(0, 3, (rows, capacity), device=DEVICE, dtype=torch.int32)
    return ids, counts, torch.full((rows,), seen, dtype=torch.int32, device=DEVICE)


def check_penalties() -> None:

    rows = 40
    logits = torch.randn(rows, VOCABULARY, device=DEVICE) * 3
    slots = torch.randperm(rows, device=DEVICE).int()
    slots[::7] = -1
    repetition, frequency, presence = (torch.rand(rows, device=DEVICE) + 0.5 for _ in range(3))
    outs = []
    tables = seen_tables(rows, 1500)
    for module in (penalties, reference):
        mine = [t.clone() for t in tables]
        edited = logits.clone()
        module.penalize(edited, slots, repetition, frequency, presence, *mine, 1500)
        for step in range(3):
            token = torch.where(torch.arange(rows, device=DEVICE) % 2 == 0, mine[0][:rows, step], step).int()
            module.count_tokens(token, slots, *mine)
        outs.append((edited, *mine))
    names = ("penalize", "seen ids", "seen counts", "seen sizes")
    for name, ours, theirs in zip(names, *outs, strict=True):
        same(name, torch.equal(ours, theirs), str((ours != theirs).sum()))
    words = torch.randint(-(2**31), 2**31 - 1, (rows, VOCABULARY // 32), device=DEVICE, dtype=torch.int32)
    pair = [logits.clone(), logits.clone()]
    penalties.keep_allowed(pair[0], slots, words)
    reference.keep_allowed(pair[1], slots, words)
    same("keep_allowed", torch.equal(*pair))


def time_elementwise() -> None:
    for rows, width in ((16384, 4096), (256, 4096), (1, 4096), (16384, 1024), (256, 1024), (1, 1024)):
        sets = 3 if rows > 1000 else 8
        xs = [torch.randn(rows, width, device=DEVICE).bfloat16() for _ in range(sets)]
        residuals = [torch.randn(rows, width, device=DEVICE).bfloat16() for _ in range(sets)]
        outs = [torch.empty_like(x) for x in xs]
        weight = torch.randn(width, device=DEVICE)
        size = rows * width * 2
        for has_residual in (False, True):
            calls = [
                (lambda x=x, r=r, o=o: norms.rms_norm(x, weight, 1e-6, o, r if has_residual else None))
                for x, r, o in zip(xs, residuals, outs, strict=True)
            ]
            kind = "residual " if has_residual else ""
            report(f"rms_norm {kind}{rows}x{width}", microseconds(calls), size * (4 if has_residual else 2))
        if rows > 1000:
            report(
                f"copy {rows}x{width}", microseconds([lambda x=x, o=o: o.copy_(x) for x, o in zip(xs, outs)]), 2 * size
            )
    for rows, width in ((16384, 14336), (256, 14336), (1, 14336), (256, 3072)):
        sets = 2 if rows > 1000 else 8
        xs = [torch.randn(rows, 2 * width, device=DEVICE).bfloat16() for _ in range(sets)]
        outs = [torch.empty(rows, width, device=DEVICE).bfloat16() for _ in range(sets)]
        calls = [lambda x=x, o=o: activations.gated_activation(x, "silu", o) for x, o in zip(xs, outs)]
        report(f"gated silu {rows}x2x{width}", microseconds(calls), rows * width * 6)


def time_draws() -> None:
    for rows in (256, 32, 1):
        sets = 2 if rows > 100 else 8
        logits = [torch.randn(rows, VOCABULARY, device=DEVICE) for _ in range(sets)]
        inverse, seed = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
        greedy, position = torch.full_like(inverse, float("inf")), torch.arange(rows, device=DEVICE, dtype=torch.int32)
        out = torch.empty(rows, dtype=torch.int32, device=DEVICE)
        size = rows * VOCABULARY * 4
        report(f"argmax {rows}", microseconds([lambda x=x: sampling.argmax(x, out) for x in logits]), size)
        report(
            f"gumbel, greedy rows {rows}",
            microseconds([lambda x=x: sampling.gumbel_argmax(x, greedy, seed, position, out) for x in logits]),
            size,
        )
        report(
            f"gumbel {rows}",
            microseconds([lambda x=x: sampling.gumbel_argmax(x, inverse, seed, position, out) for x in logits]),
            size,
        )
        if rows == 256:
            report("torch.argmax 256", microseconds([lambda x=x: torch.argmax(x, -1) for x in logits]), size)


def show_kernels(call: Callable[[], None]) -> None:
    """Each kernel's own time in a call."""
    if is_warming:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
    parts = [
        f"{event.key.removesuffix('_kernel')} {event.device_time_total / event.count:.1f}"
        for event in profile.key_averages()
        if event.key.endswith("_kernel")
    ]
    print("      " + ", ".join(parts))


def try_variants(calls: list[Callable[[], None]]) -> None:
    module = filters_window
    before = module.PART, module.PART_WARPS, module.REGION, sampling_heads.SELECT_WARPS
    try:
        for part, part_warps, region, select_warps in ((8192, 16, 2048, 2), (2048, 4, 512, 4), (2048, 8, 512, 1)):
            module.PART, module.PART_WARPS, module.REGION = part, part_warps, region
            sampling_heads.SELECT_WARPS = select_warps
            report(f"      part {part} warps {part_warps}, select warps {select_warps}", microseconds(calls))
            show_kernels(calls[0])
    finally:
        module.PART, module.PART_WARPS, module.REGION, sampling_heads.SELECT_WARPS = before


def time_filters() -> None:
    for rows in (256, 1):
        for shape in ("peaked", "flat"):
            scale = 1.0 if shape == "flat" else 4.0
            logits = [torch.randn(rows, VOCABULARY, device=DEVICE) * scale for _ in range(2)]
            seed, position = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE, dtype=torch.int32)
            threshold, out = torch.empty(rows, device=DEVICE), torch.empty(rows, dtype=torch.int32, device=DEVICE)
            for name, top_k, top_p, min_p in (
                ("top-k 50", 50, 1.0, 0.0),
                ("top-k 1000", 1000, 1.0, 0.0),
                ("top-p 0.9", 0, 0.9, 0.0),
                ("top-k 50 top-p 0.9", 50, 0.9, 0.0),
                ("top-p 0.999", 0, 0.999, 0.0),
                ("min-p 0.1", 0, 1.0, 0.1),
            ):
                columns = (
                    torch.ones(rows, device=DEVICE),
                    torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
                    torch.full((rows,), top_p, device=DEVICE),
                    torch.full((rows,), min_p, device=DEVICE),
                )
                calls = [
                    lambda x=x, c=columns: filters.filtered_gumbel_argmax(x, *c, seed, position, threshold, out)
                    for x in logits
                ]
                report(f"{name}, {shape}, {rows} rows", microseconds(calls))
                show_kernels(calls[0])
                if rows == 256 and name in ("top-p 0.9", "top-k 1000"):
                    try_variants(calls)
        logits_SV = logits[0]
        index, tokens = torch.arange(rows, device=DEVICE, dtype=torch.int32), position
        for count in (0, 20):
            values = torch.empty(rows, count + 1, device=DEVICE)
            ids, ranks = (
                torch.empty_like(values, dtype=torch.int32),
                torch.empty(rows, dtype=torch.int32, device=DEVICE),
            )
            call = lambda v=values, i=ids: logprobs.token_logprobs(logits_SV, index, tokens, True, v, i, ranks)  # noqa: E731
            report(f"logprobs {count}, {rows} rows", microseconds([call]))
        maxima = torch.randn(rows, 1187, device=DEVICE)
        report(f"select_heads {rows}", microseconds([lambda m=maxima: sampling_heads.select_heads(m)]))
        report(f"hide_below {rows}", microseconds([lambda: filters.hide_below(logits_SV, threshold)]))


def time_penalties() -> None:
    for rows, seen in ((256, 1500), (256, 8000), (1, 1500)):
        logits = torch.randn(rows, VOCABULARY, device=DEVICE)
        slots = torch.randperm(rows, device=DEVICE).int()
        columns = [torch.rand(rows, device=DEVICE) + 0.5 for _ in range(3)]
        tables = seen_tables(rows, seen)
        report(
            f"penalize {rows} rows, {seen} seen",
            microseconds([lambda: penalties.penalize(logits, slots, *columns, *tables, seen)]),
        )
        tokens = tables[0][:, seen // 2].contiguous()
        report(f"count_tokens {rows}, {seen}", microseconds([lambda: penalties.count_tokens(tokens, slots, *tables)]))


def run_alone(name: str) -> None:
    """One section in this process, for its checks and to leave its compiled kernels in Triton's cache."""
    global is_warming
    is_warming = True
    section(globals()[name])
    pathlib.Path(sys.argv[2]).write_text(json.dumps(results))


def main() -> None:
    torch.manual_seed(0)
    triton_kernels.register()
    if len(sys.argv) > 1:
        run_alone(sys.argv[1])
        return
    # Compiling takes most of the time and one core a process: every section runs once beside the others, then the times.
    folder = pathlib.Path(tempfile.mkdtemp())
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, name, str(folder / name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in (*CHECKS, *TIMES)
    }
    for name, process in processes.items():
        output = process.communicate()[0]
        found = (
            json.loads((folder / name).read_text()) if (folder / name).exists() else {f"{name} failed": output[-500:]}
        )
        if name in CHECKS:
            print(output[-1500:].strip())
            results.update(found)
    print(f"checked and compiled after {time.monotonic() - started:.1f} s")
    for name in TIMES:
        section(globals()[name])
    wrong = [name for name, value in results.items() if name.startswith("correct") and not value]
    failed = [name for name in results if name.endswith("failed")]
    print(f"{sum(name.startswith('correct') for name in results)} checks, wrong: {wrong[:12]}, failed: {failed}")
    print(f"{time.monotonic() - started:.1f} s")
    out = pathlib.Path(os.environ.get("OUT", "."))
    (out / "sampling.json").write_text(json.dumps(results, indent=1))


main()
