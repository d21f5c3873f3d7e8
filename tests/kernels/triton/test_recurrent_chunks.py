"""Scans in chunks against the references in float64: requests of drawn lengths, anywhere in their pages, beside each other."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.oracles.drawn_cases import implementation
from tests.oracles.float64 import in_float64
from torch import Tensor
from triton import jit

from quire.conformance.cases.states import PAGES_A_ROW, Pages
from quire.kernels import registry, triton
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.recurrent import delta as recurrent_delta
from quire.kernels.triton.recurrent import scan as recurrent_scan
from quire.kernels.triton.recurrent import selective as recurrent_selective
from quire.kernels.triton.recurrent import ssd as recurrent_ssd
from quire.kernels.triton.recurrent.chunks import FROM, Tiles
from quire.kernels.types import DeltaWeights, SsdWeights

DEVICE = "cpu" if interpreted() else "cuda"
triton.register()
BOUND = 1e-4
"""Of an error, as a part of the largest number; an output in bfloat16 is rounded by 2e-3 of it."""
MODULES: dict[str, Any] = {
    "selective_scan": recurrent_selective, "ssd_scan": recurrent_ssd, "gated_delta_rule": recurrent_delta
}  # fmt: skip
LAUNCHES = {
    "selective_scan": "launch_selective_chunks", "ssd_scan": "launch_ssd_chunks", "gated_delta_rule": "launch_delta_chunks"
}  # fmt: skip
LARGEST = {
    "selective_scan": recurrent_selective.WIDE, "ssd_scan": recurrent_ssd.HOPPER, "gated_delta_rule": recurrent_delta.HOPPER
}  # fmt: skip
Work = list[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's sizes (Mamba's channels are those of all heads), and what is hard about it: `decay` multiplies the logarithms of
    decays; with `alike` all keys of a head are nearly the same."""

    name: str
    heads: int = 2
    shared: int = 1
    size: int = 16
    width: int = 24
    decay: float = 1.0
    alike: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    beta_scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def out(self) -> tuple[int, ...]:
        return (self.heads * self.width,) if self.name == "selective_scan" else (self.heads, self.width)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.size, *self.out) if self.name == "selective_scan" else (self.heads, self.size, self.width)

    def inputs(self, tokens: int, seed: int) -> list[Tensor]:
        """Columns of one wider matrix, in the order of the operation's arguments."""
        keys, heads = (self.heads // self.shared, self.size), (self.heads,)
        shapes = {
            "selective_scan": [self.out, self.out, keys[1:], keys[1:]],
            "ssd_scan": [self.out, heads, keys, keys],
            "gated_delta_rule": [keys, keys, self.out, heads, heads],
        }[self.name]
        counts = [torch.Size(shape).numel() for shape in shapes]
        rows = torch.randn(tokens, sum(counts) + 3, generator=torch.Generator().manual_seed(seed))
        parts = rows.to(DEVICE, self.dtype)[:, : sum(counts)].split(counts, dim=1)
        if self.alike:
            parts[2 if self.name == "selective_scan" else shapes.index(keys, 1)].mul_(0.05).add_(1.0)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def weights(self) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1)
        if self.name == "selective_scan":
            drawn = torch.randn(self.size + 1, *self.out, generator=generator).to(DEVICE)
            return -drawn[1:].exp() * self.decay, drawn[0]
        drawn = torch.randn(3, self.heads, generator=generator).to(DEVICE)
        a, d, bias = -drawn[0].exp() * self.decay, drawn[1], drawn[2]
        if self.name == "ssd_scan":
            return (SsdWeights(a, d, bias, *self.limits),)
        return (DeltaWeights(a, bias, self.beta_scale),)


@pytest.fixture(autouse=True, scope="module")
def rounded() -> Iterator[None]:
    """The interpreter cuts bfloat16 off; it rounds here, as a device does."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def round_and_convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = round_and_convert
    yield
    interpreter._convert_float = convert


class Step:
    """Requests whose first tokens were computed before, and a step over the next: (row, tokens before, tokens now) each."""

    def __init__(self, layer: Layer, page: int, work: Work) -> None:
        self.layer, self.work, self.weights = layer, work, layer.weights()
        self.exact, self.pages = implementation(layer.name, "any"), Pages(page, device=DEVICE)
        self.tokens = {row: layer.inputs(done + count, row) for row, done, count in work}
        states = self.pages.allocate(*layer.state)
        with in_float64():
            self.oracle = states.double()
            if before := [(row, 0, done) for row, done, _ in work if done]:
                self.run(self.exact, before, self.oracle)
            self.states = states.copy_(self.oracle)
            self.oracle = states.double()
            self.expected = self.run(self.exact, work, self.oracle)

    def run(self, function: Callable[..., None], work: Work, states: Tensor, beyond: int = 0, **options: Any) -> Tensor:
        cut = [[part[done : done + count] for part in self.tokens[row]] for row, done, count in work]
        rows = torch.cat([torch.cat([part.flatten(1) for part in parts], dim=1) for parts in cut])
        rows = torch.nn.functional.pad(rows, (0, 5), value=float("nan"))  # columns of a wider matrix
        shapes = [part.shape[1:] for part in cut[0]]
        columns = rows[:, :-5].split([shape.numel() for shape in shapes], dim=1)
        inputs = [column.unflatten(1, shape) for column, shape in zip(columns, shapes, strict=True)]
        metadata = self.pages.fill(work)
        metadata.num_requests += beyond
        metadata.query_start[len(work) + 1 :], metadata.seq_lens[len(work) :] = len(rows), 0
        out = torch.full((len(rows) + 1, *self.layer.out), float("nan"), dtype=states.dtype, device=DEVICE)
        function(*inputs, *self.weights, states, metadata, out[:-1], **options)
        assert out[-1].isnan().all(), "wrote beyond its rows"
        return out[:-1]

    def check(self, function: Callable[..., None], beyond: int = 0, **options: Any) -> None:
        """What the step gives and leaves in every page."""
        got = self.run(function, self.work, self.states, beyond, **options)
        for ours, theirs in ((got, self.expected), (self.states, self.oracle)):
            largest = float(theirs.nan_to_num(0.0).abs().max())
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=BOUND * largest, equal_nan=True)


@st.composite
def drawn(draw: st.DrawFn, name: str, most: int) -> tuple[Step, Tiles]:
    chunk = draw(st.sampled_from([16, 32]))
    page = draw(st.sampled_from([chunk, 2 * chunk, 3 * chunk - 5, chunk - 3, chunk + 7]))
    around = st.sampled_from([1, chunk - 1, chunk, chunk + 1, page - 1, page, page + 1, 2 * page, 2 * page + chunk + 1])
    work = []
    for row in range(draw(st.integers(1, 3))):
        done = draw(st.one_of(st.just(0), around, st.integers(1, most)))
        count = min(draw(st.one_of(around, st.integers(1, most))), page * PAGES_A_ROW - done, most)
        work.append((row, done, count))
    heads, shared, size, width = draw(st.sampled_from([(2, 2, 5, 8), (1, 1, 16, 24), (3, 1, 3, 20), (2, 1, 40, 16)]))
    if name == "selective_scan":
        size = min(size, 6)  # they are looked at one by one, which is slow here
    layer = Layer(
        name, heads, shared, size, width, draw(st.sampled_from([1e-3, 1.0, 30.0])), draw(st.booleans()),
        draw(st.sampled_from([(0.0, float("inf")), (0.5, 1.0)])), draw(st.sampled_from([1.0, 2.0])),
        draw(st.sampled_from([torch.bfloat16, torch.float16] + [torch.float32] * (name == "selective_scan"))),
    )  # fmt: skip
    return Step(layer, page, work), Tiles(chunk, draw(st.sampled_from([16, 32])), num_warps=4)


def check_drawn(name: str, data: st.DataObject, most: int) -> None:
    step, tiles = data.draw(drawn(name, most))
    step.check(getattr(MODULES[name], LAUNCHES[name]), beyond=data.draw(st.integers(0, 1)), fewest=1, tiles=tiles)


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=5, derandomize=True, phases=[Phase.generate])  # shorter steps say no more
@given(data=st.data())
def test_chunks_of_any_request_give_what_its_tokens_give(name: str, data: st.DataObject) -> None:
    check_drawn(name, data, most=60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=40, phases=[Phase.generate])
@given(data=st.data())
def test_chunks_of_many_requests_give_what_their_tokens_give(name: str, data: st.DataObject) -> None:
    check_drawn(name, data, most=200)


@pytest.mark.parametrize("name", MODULES)
def test_a_step_of_short_and_long_requests_takes_both_ways(name: str) -> None:
    """As in a captured graph: with more requests than there are."""
    size = 3 if name == "selective_scan" else 12  # they are looked at one by one, which is slow here
    step = Step(Layer(name, heads=2, size=size, width=20), 48, [(0, 40, 1), (1, 3, FROM - 1), (2, 95, FROM)])
    step.check(MODULES[name].__dict__[name], beyond=1)


@pytest.mark.parametrize("tokens", [32, 80])
def test_the_delta_rule_gives_the_same_in_parts_of_less_memory(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin and end in requests, chunks and pages."""
    layer, chunk = Layer("gated_delta_rule", heads=2, size=12, width=20), 16
    monkeypatch.setattr(recurrent_delta, "SCRATCH", 4 * layer.heads * chunk * tokens)
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, float("nan"), **kind))
    step = Step(layer, 50, [(0, 40, 70), (1, 0, 5), (2, 95, 61)])
    step.check(recurrent_delta.launch_delta_chunks, beyond=1, fewest=1, tiles=Tiles(chunk, 16, num_warps=4))


@pytest.mark.parametrize("name", MODULES)
def test_sixty_four_tokens_a_chunk(name: str) -> None:
    """Hopper's tiles, whose inverses have one level more."""
    size = 8 if name == "selective_scan" else 32
    step = Step(Layer(name, heads=1, size=size, width=16, decay=0.02, alike=True, beta_scale=2.0), 150, [(0, 30, 140)])
    step.check(getattr(MODULES[name], LAUNCHES[name]), fewest=1, tiles=LARGEST[name])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("count", "page", "size", "dtype", "goes"),
    [
        (FROM, 64, 16, torch.bfloat16, True),
        (1, 64, 16, torch.bfloat16, False),
        (FROM - 1, 64, 16, torch.bfloat16, False),
        (FROM, FROM - 1, 16, torch.bfloat16, False),
        (FROM, 64, 300, torch.bfloat16, False),
        (FROM, 64, 16, torch.float32, False),
    ],
)
def test_what_the_host_knows_of_a_step_says_whether_it_has_chunks(
    name, count, page, size, dtype, goes, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    calls: list[str] = []
    monkeypatch.setattr(MODULES[name], LAUNCHES[name], lambda *_, **__: calls.append("chunks"))
    monkeypatch.setattr(
        MODULES[name], "scan_by_token", lambda *_, **options: calls.append(str(options.get("most", "all")))
    )
    step = Step(Layer(name, heads=1, size=size, width=8, dtype=dtype), page, [(0, 0, count)])
    step.run(MODULES[name].__dict__[name], step.work, step.states)
    goes |= name == "selective_scan" and (
        size == 300 or dtype == torch.float32
    )  # rounds nothing, holds one number a thread
    assert calls == ([str(FROM - 1), "chunks"] if goes else ["all"])


@pytest.mark.parametrize("name", MODULES)
def test_results_that_must_not_depend_on_the_batch_go_token_by_token(name: str) -> None:
    assert registry.choose(name, "cuda").chosen.function is MODULES[name].__dict__[name]
    assert registry.choose(name, "cuda", deterministic=True).chosen.function is recurrent_scan.__dict__[name]


@jit
def softplus_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 4096)
    tl.store(out_ptr + at, recurrent_selective.softplus(tl.load(x_ptr + at)))


def test_the_polynomial_for_time_steps_is_as_good_as_float32() -> None:
    x = torch.linspace(-80, 80, 4096, device=DEVICE)
    out = torch.empty_like(x)
    softplus_kernel[(1,)](x, out)
    error = (out.double() / torch.nn.functional.softplus(x.double(), threshold=100) - 1).abs()
    assert (error <= 4e-7 + 1.2e-7 * x.abs()).all(), "the exponent itself is rounded to 2^-24"


COMPILE = """
import re, subprocess, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quire.kernels.triton.recurrent import delta as recurrent_delta
from quire.kernels.triton.recurrent import selective as recurrent_selective
from quire.kernels.triton.recurrent import ssd as recurrent_ssd

POINTERS = {"query_start_ptr": "*i32", "seq_lens_ptr": "*i32", "rows_ptr": "*i32", "table_ptr": "*i32"}
POINTERS |= dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
FLOATS = ("dt_min", "dt_max", "query_scale", "beta_scale")

def check(kernel, capability, warps, stages, most_spilled=640, registers=None, **constants):
    constants |= {"PDL": capability >= 90}
    default = lambda name: "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, default(name)) for name in names}
    aligned = [(at,) for at, name in enumerate(names) if name.endswith(("_ptr", "_stride", "page_size"))]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()},
        {at: [["tt.divisibility", 16]] for at in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = int(re.search(r"STACK:([0-9]+)", usage)[1])
    assert spilled <= most_spilled, f"{kernel.__name__} for {capability} keeps {spilled} bytes a thread outside of its registers"
    assert compiled.metadata.shared <= (227 if capability >= 90 else 99) * 1024 // 2, "two programs a multiprocessor"
    if "selective" not in kernel.__name__:
        assert ("wgmma" if capability == 90 else "mma.sync") in compiled.asm["ptx"]

for capability, place in ((90, "HOPPER"), (80, "OTHERS"), (120, "OTHERS")):
    for kernel, width in ((recurrent_ssd.ssd_chunks_kernel, 64), (recurrent_delta.delta_chunks_kernel, 128)):
        tiles = getattr(recurrent_ssd if width == 64 else recurrent_delta, place)
        sizes = {"WIDTH": width, "SIZE": 128, "STATE": 128, "CHUNK": tiles.chunk, "BLOCK": tiles.block(128, width)}
        check(kernel, capability, tiles.num_warps, tiles.num_stages, **sizes)
    check(recurrent_delta.delta_inverses_kernel, capability, 4, tiles.num_stages, CHUNK=tiles.chunk, STATE=128)
    for groups, block in ((4, 32), (8, 16)):
        check(
            recurrent_selective.selective_chunks_kernel, capability, 4, 1, 96 * (capability == 120),
            recurrent_selective.MAX_REGISTERS, STEPS=16, GROUPS=groups, BLOCK=block,
        )
"""


@pytest.mark.exhaustive
def test_the_kernels_compile_for_their_devices_and_fit_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
