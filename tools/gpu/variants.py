"""Each special kernel beside the general one that would take its place, on shapes that users run, on one GPU.

    PYTHONPATH=src python3 tools/gpu/variants.py [--only NAME …] [--seconds 160]

A case is checked against its reference both ways, then timed both ways in turns: layers one after another in a CUDA graph,
whose weights the L2 cache does not hold. Prints a table, with the statements of what could be deleted; writes
$OUT/variants.json. A variant with a gain of 10 % in some case that is chosen today is kept. Kernels are compiled by several
processes first. Without a GPU (TRITON_INTERPRET=1) small cases are checked, and nothing is timed.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import moe as moe_bench
import packed as packed_bench
import prefill as prefill_bench
from fp8 import make_weight, relative_error
from packed import DEVICE, EPS, SMALL, inputs_of, microseconds
from packed import multiply as multiply_packed
from tests.oracles.operations import fp8 as fp8_reference
from tests.oracles.operations import linear as linear_reference
from tests.oracles.operations import packed as packed_reference
from tests.oracles.operations import sampling as sampling_reference
from tools.house import ROOT, count_statements

from quire.kernels import ops, triton
from quire.kernels.triton.attention import prefill
from quire.kernels.triton.experts import configs as moe_configs
from quire.kernels.triton.experts import mixture
from quire.kernels.triton.fp8 import matmul as fp8
from quire.kernels.triton.fp8.scales import apply_scales
from quire.kernels.triton.linear import configs as linear_configs
from quire.kernels.triton.linear import matmul as linear
from quire.kernels.triton.packed import int8
from quire.kernels.triton.packed import matmul as packed
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.triton.sampling import filters
from quire.kernels.types import Fp8Scratch

KEEP = 1.10
BOUND = 2.0**-5 if SMALL else 2.0**-6
"""Of errors: what rounding to bfloat16 explains, which the interpreter cuts off."""
COMPILERS = 14
MODELS = {"small": {"qkv": (192, 1024), "gate_up": (128, 1024), "down": (64, 1024)}} if SMALL else {
    "0.6B": {"qkv": (4096, 1024), "out": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "8B": packed_bench.SHAPES,
    "0.6B head": {"head": (151936, 1024)},
    "8B head": {"head": (128256, 4096)},
}  # fmt: skip
LAYERS = {"small": 1, "0.6B": 28, "8B": 4, "0.6B head": 2, "8B head": 2}
DELETED = {
    "packed-gemv": ["packed/gemv.py"],
    "packed-vector": ["packed/vector.py"],
    "fp8-vector": ["fp8/vector.py"],
    "filters-window": ["sampling/filters_window.py"],
    "experts-few": ["experts/few.py"],
    "linear-gemv": ["linear/gemv.py"],
    "int8": ["packed/int8.py:_int8_dot"],
    "hopper": ["attention/hopper.py", "attention/hopper_kernel.py", "attention/hopper_load.py"],
}
"""Files, or functions of files, without what their callers then lose too."""
Way = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass
class Case:
    """What is timed. `build` makes it with so many layers: what runs one of them, and the error of the first one's results."""

    pair: str
    name: str
    layers: int
    build: Callable[[int], tuple[Callable[[int], None], Callable[[], float]]]
    general: Way
    special: Way = contextlib.nullcontext
    bound: float = BOUND
    compiled_as: str = ""
    is_chosen: bool = True
    """Whether the special kernel is what such a step takes today."""


def patched(module: Any, name: str, value: Any) -> Way:
    return lambda: mock.patch.object(module, name, value)


def statements(pair: str) -> int:
    total = 0
    for place in DELETED[pair]:
        file, _, function = place.partition(":")
        tree = ast.parse((ROOT / "src/quire/kernels/triton" / file).read_text())
        parts = [node for node in tree.body if getattr(node, "name", None) == function] if function else [tree]
        total += sum(count_statements(list(ast.walk(part))) for part in parts)
    return total


# --- matrices of codes ---


def hqq(n: int, k: int) -> Any:
    weight = packed_bench.packed_weight(n, k, 4, 64, zeros=True)
    return dataclasses.replace(weight, zero=weight.zero + torch.rand_like(weight.zero))


@functools.cache
def fp8_scratch() -> Fp8Scratch:
    return Fp8Scratch(16, 14336, DEVICE)


def multiply_fp8(name: str, weight: Any, given: tuple[torch.Tensor, ...], module: Any = fp8) -> torch.Tensor:
    x_TK, norm_K, out_TN, narrow_TI, _, wide_TN = given
    if name == "gate_up":
        module.fp8_norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", narrow_TI, wide_TN, fp8_scratch())
        return narrow_TI
    if name == "qkv":
        module.fp8_norm_linear(x_TK, norm_K, EPS, weight, out_TN, fp8_scratch())
    else:
        module.fp8_linear_add(x_TK, weight, out_TN, wide_TN, fp8_scratch())
    return out_TN


def multiply_plain(name: str, weight: Any, given: tuple[torch.Tensor, ...], module: Any = linear) -> torch.Tensor:
    x_TK, norm_K, out_TN, narrow_TI, scratch_TK, wide_TN = given
    if name == "gate_up":
        module.norm_linear_gated(x_TK, norm_K, EPS, weight, "silu", narrow_TI, scratch_TK, wide_TN)
        return narrow_TI
    if name == "qkv":
        module.norm_linear(x_TK, norm_K, EPS, weight, out_TN, scratch_TK)
    else:
        (module.linear if name == "head" else module.linear_add)(x_TK, weight, out_TN)
    return out_TN


def multiply_int8(_: str, weight: Any, given: tuple[torch.Tensor, ...], module: Any = packed) -> torch.Tensor:
    module.int8_linear(given[0], weight, given[2])
    return given[2]


class LibraryDot:
    """In the place of `_int8_dot`: the library's product, then scales in a launch of their own."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._multiply

    def _multiply(self, x: Any, x_scale: Any, w: Any, w_scale: Any, bias: Any, out: Any, *_: Any, **__: Any) -> None:
        weight: Any = SimpleNamespace(scale=w_scale, bias=bias)
        apply_scales(torch._int_mm(x, w.t()), x_scale, weight, out)


FORMS: dict[str, tuple[Callable[[int, int], Any], Callable[..., torch.Tensor], Any]] = {
    "fractional zeros, 64": (hqq, multiply_packed, packed_reference),
    "table with zeros, 64": (
        lambda n, k: packed_bench.packed_weight(n, k, 4, 64, zeros=True, table="any"),
        multiply_packed,
        packed_reference,
    ),
    "int4, 128": (lambda n, k: packed_bench.packed_weight(n, k, 4, 128, zeros=True), multiply_packed, packed_reference),
    "int4, 64": (lambda n, k: packed_bench.packed_weight(n, k, 4, 64, zeros=True), multiply_packed, packed_reference),
    "float8": (functools.partial(make_weight, device=DEVICE), multiply_fp8, fp8_reference),
    "bfloat16": (packed_bench.bfloat16_weight, multiply_plain, linear_reference),
    "int8": (packed_bench.int8_weight, multiply_int8, packed_reference),
}


@functools.lru_cache(maxsize=4)
def coded_layers(form: str, model: str, layers: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first layer as it is, and all of them as kernels want them."""
    made = [{name: FORMS[form][0](n, k) for name, (n, k) in MODELS[model].items()} for _ in range(layers)]
    return made[0], [{name: packed_bench.prepared(weight) for name, weight in layer.items()} for layer in made]


def coded(
    pair: str,
    form: str,
    rows: int,
    general: Way,
    special: Way = contextlib.nullcontext,
    is_chosen: bool = True,
    heads: bool = False,
) -> Iterator[Case]:
    """A layer's matrices of each model in a form."""
    _, multiply, reference = FORMS[form]

    def build(layers: int, model: str) -> tuple[Callable[[int], None], Callable[[], float]]:
        first, ready = coded_layers(form, model, layers)
        given = {name: inputs_of(rows, k, n) for name, (n, k) in MODELS[model].items()}

        def run(layer: int) -> None:
            for name, weight in ready[layer].items():
                multiply(name, weight, given[name])

        def error_of(name: str) -> float:
            given[name][2].zero_()
            expected = multiply(name, first[name], given[name], reference).clone()
            given[name][2].zero_()
            return relative_error(multiply(name, ready[0][name], given[name]), expected)

        return run, lambda: max(error_of(name) for name in first)

    bound = 0.06 if form == "float8" else BOUND  # rows are rounded to float8 in one of the ways
    for model in [model for model in MODELS if heads or "head" not in model]:
        name = f"{model}, {form}, {rows} rows"
        make = functools.partial(build, model=model)
        yield Case(pair, name, LAYERS[model], make, general, special, bound, is_chosen=is_chosen)


CHOOSE = linear_configs.choose


def of_five_rows(rows: int, *shape: Any) -> linear_configs.Config:
    """The tensor cores' blocks for the fewest rows."""
    return CHOOSE(max(rows, 5), *shape)


def matrix_cases() -> Iterator[Case]:
    for (form, most), rows in itertools.product(
        {"fractional zeros, 64": 1, "table with zeros, 64": 2}.items(), (1, 2, 4)
    ):
        ways = patched(packed, "max_rows", lambda _: 0), patched(packed, "max_rows", lambda _: 4)
        yield from coded("packed-gemv", form, rows, *ways, is_chosen=rows <= most)
    for form in ("int4, 128", "int4, 64"):
        yield from coded("packed-vector", form, 1, patched(packed_vector, "choose", lambda *_: None))
    for rows in (1, 2, 4):
        vectors = patched(fp8, "VECTOR_ROWS", max(rows, fp8.VECTOR_ROWS))
        is_chosen = rows <= fp8.VECTOR_ROWS
        yield from coded("fp8-vector", "float8", rows, patched(fp8, "VECTOR_ROWS", 0), vectors, is_chosen)
    for rows in (20,) if SMALL else (64, 512, 2048):  # the library takes no fewer than 17
        yield from coded("int8", "int8", rows, patched(int8, "_int8_dot", LibraryDot()))
    for rows in (1, 2, 4):
        yield from coded("linear-gemv", "bfloat16", rows, patched(linear_configs, "choose", of_five_rows), heads=True)


# --- experts, attention, filters ---


@contextlib.contextmanager
def few_tokens(most: int) -> Iterator[None]:
    with mock.patch.object(moe_configs, "MAX_FEW_TOKENS", most):
        moe_configs.choose.cache_clear()
        yield
    moe_configs.choose.cache_clear()


def expert_cases() -> Iterator[Case]:
    bench_of = functools.lru_cache(maxsize=1)(moe_bench.Bench)

    def build(layers: int, rows: int) -> tuple[Callable[[int], None], Callable[[], float]]:
        bench = bench_of(layers)
        x_TD, num_tokens = bench.x_TD[:rows].normal_(), bench.shape(rows)

        def error() -> float:
            start, actual = x_TD.clone(), x_TD.clone()
            expected = bench.expected(start, num_tokens)
            bench.mixture(mixture.norm_moe, actual, num_tokens, 0)
            return relative_error(actual - start, expected - start)

        return lambda layer: bench.mixture(mixture.norm_moe, x_TD, num_tokens, layer), error

    for rows in (1, 2, 4, 8):
        make, is_chosen = functools.partial(build, rows=rows), rows <= moe_configs.MAX_FEW_TOKENS
        ways = functools.partial(few_tokens, 0), functools.partial(few_tokens, 8)
        yield Case("experts-few", f"30B-A3B, {rows} rows", 1 if SMALL else 6, make, *ways, 0.05, is_chosen=is_chosen)


def attention_cases() -> Iterator[Case]:
    def build(_: int, tokens: int) -> tuple[Callable[[int], None], Callable[[], float]]:
        heads = {"num_heads": 4, "num_kv_heads": 2} if SMALL else {}
        batch = prefill_bench.make_batch([(tokens, tokens)], **heads)
        out = batch.out()

        def error() -> float:
            prefill_bench.chosen(batch, out, 2)
            expected = batch.out()
            if tokens <= 2048:
                prefill_bench.reference(batch.qkv, batch.kv_cache, batch.metadata, batch.params, expected)
            else:  # scores of all tokens are too many
                prefill_bench.plain()(batch, expected, 2)
            return relative_error(out, expected)

        return lambda _: prefill_bench.chosen(batch, out, 2), error

    portable = patched(prefill, "_hopper_kernel", lambda: None)
    for tokens in (150,) if SMALL else (2048, 8192, 32768):
        make = functools.partial(build, tokens=tokens)
        is_chosen = SMALL or prefill._hopper_kernel() is not None
        yield Case("hopper", f"8B, prompt of {tokens}", 1, make, portable, is_chosen=is_chosen)


def filter_cases() -> Iterator[Case]:
    def build(
        layers: int, rows: int, vocabulary: int, scale: float, top_k: int
    ) -> tuple[Callable[[int], None], Callable[[], float]]:
        logits = [torch.randn(rows, vocabulary, device=DEVICE) * scale for _ in range(min(layers, 2))]
        columns = [torch.full((rows,), value, device=DEVICE) for value in (1.0, top_k, 0.9, 0.0)]
        columns[1] = columns[1].int()
        seed = torch.arange(rows, device=DEVICE)

        def draw(module: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            threshold, out = torch.empty(rows, device=DEVICE), torch.empty(rows, dtype=torch.int32, device=DEVICE)
            module.filtered_gumbel_argmax(logits[layer % len(logits)], *columns, seed, seed, threshold, out)
            return threshold, out

        def error() -> float:
            """Share of rows whose cut is more than three values away, or whose draw differs at the same cut."""
            (got, got_out), (expected, out) = draw(filters, 0), draw(sampling_reference, 0)
            low, high = torch.minimum(got, expected)[:, None], torch.maximum(got, expected)[:, None]
            between = ((logits[0] >= low) & (logits[0] < high)).sum(1)
            return float(((between > 3) | ((between == 0) & (got_out != out))).float().mean())

        return lambda layer: draw(filters, layer) and None, error

    general = patched(filters, "solve_open_rows", lambda *_: None)
    sizes = ((3,), (5000,)) if SMALL else ((1, 32, 256), (32_000, 151_936))
    shapes = {"peaked": 3.0, "flat": 1.0}
    for vocabulary, rows, top_k, shape in itertools.product(sizes[1], sizes[0], (50, 0), shapes):
        name = f"{f'top-k {top_k}, ' if top_k else ''}top-p 0.9, {shape}, {rows} of {vocabulary}"
        given = {"rows": rows, "vocabulary": vocabulary, "scale": shapes[shape], "top_k": top_k}
        make = functools.partial(build, **given)
        yield Case("filters-window", name, 8, make, general, bound=1e-9, compiled_as=str(vocabulary))


def all_cases(only: list[str]) -> list[Case]:
    groups = (attention_cases, filter_cases, expert_cases, matrix_cases)
    return [case for group in groups for case in group() if not only or case.pair in only]


def compile_case(number: int, only: list[str]) -> None:
    """In a process of its own: launch both ways once, so that Triton's cache on disk holds their kernels."""
    case = all_cases(only)[number]
    for way in (case.special, case.general):
        with contextlib.suppress(Exception), way():  # the measurement reports what fails
            case.build(1)[0](0)


def compile_all(cases: list[Case], only: list[str], seconds: float) -> None:
    kinds = {(case.pair, case.compiled_as or case.name): number for number, case in enumerate(cases)}
    with multiprocessing.get_context("spawn").Pool(COMPILERS, prepare) as pool:
        waiting = pool.starmap_async(compile_case, [(number, only) for number in kinds.values()], chunksize=1)
        try:
            waiting.get(seconds)
        except multiprocessing.TimeoutError:
            print("not everything was compiled beforehand", flush=True)


def measure(case: Case, row: dict[str, Any]) -> None:
    """Into the row: errors of both ways, and microseconds of a layer by each, the better of two turns."""
    run, error = case.build(case.layers)
    ways = (("special", case.special), ("general", case.general))
    for name, way in ways:
        with way():
            row[f"{name} error"] = error()
        if not row[f"{name} error"] <= case.bound:
            raise ArithmeticError(f"the {name} way is wrong by {row[f'{name} error']}")
    for name, way in () if SMALL else (*ways, *ways):
        with way():
            taken = microseconds(lambda: [run(layer) for layer in range(case.layers)], case.layers)
        row[f"{name} us"] = min(taken, row.get(f"{name} us", taken))
    if not SMALL:
        row["ratio"] = row["general us"] / row["special us"]


def prepare() -> None:
    torch.manual_seed(0)
    triton.register()
    ops.select("cuda")


def show(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {row[name]:9.2f}" for name in ("special us", "general us", "ratio") if name in row)
    errors = f"errors {row.get('special error', 0.0):.5f} {row.get('general error', 0.0):.5f}"
    note = "" if row["is_chosen"] else "  (not chosen today)"
    print(f"{row['pair']:15} {row['case']:44} {times}  {errors}{note}  {row.get('failure', '')}", flush=True)


def judge(rows: list[dict[str, Any]], pair: str) -> dict[str, Any]:
    timed = [row for row in rows if row["pair"] == pair and "ratio" in row and row["is_chosen"]]
    best = max(timed, key=lambda row: row["ratio"], default=None)
    verdict = "not timed" if best is None else "keep" if best["ratio"] >= KEEP else "delete"
    told = "" if best is None else f"at best {best['ratio']:.2f}: {best['case']}"
    print(f"{pair:15} {statements(pair):5} statements  {verdict:9} {told}")
    return {"pair": pair, "statements": statements(pair), "verdict": verdict, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], choices=list(DELETED))
    parser.add_argument("--seconds", type=float, default=160)
    arguments = parser.parse_args()
    begin = time.monotonic()
    cases = all_cases(arguments.only)
    if not SMALL:
        compile_all(cases, arguments.only, arguments.seconds * 0.55)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    prepare()
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append({"pair": case.pair, "case": case.name, "is_chosen": case.is_chosen})
        try:
            if time.monotonic() - begin > arguments.seconds - 4:
                raise TimeoutError("no time left")
            measure(case, rows[-1])
        except Exception as error:  # one case must not end the others
            rows[-1]["failure"] = f"{type(error).__name__}: {str(error)[:200]}"
        show(rows[-1])
    found = {
        "device": "cpu" if SMALL else torch.cuda.get_device_name(),
        "verdicts": [judge(rows, pair) for pair in arguments.only or DELETED],
        "cases": rows,
    }
    print(f"{found['device']}, {time.monotonic() - begin:.0f} s, {sum('failure' in row for row in rows)} failures")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "variants.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
