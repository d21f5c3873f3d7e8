"""Scans by token and by chunks on one GPU: correctness against the reference in float64, then microseconds beside each other.

`python3 tools/gpu/recurrent.py` with PYTHONPATH=src. Prints tables; writes $OUT/recurrent.json. Lengths around `FROM` say from
where chunks pay; with TUNE="Mamba 2.8B,Qwen3-Next" tiles of these layers are timed instead. Without a GPU (TRITON_INTERPRET=1)
small layers are checked, and nothing is timed.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from packed import DEVICE, SMALL, microseconds
from tests.oracles.float64 import in_float64
from tests.oracles.operations import recurrent as reference

from quire.attention.interface import AttentionMetadata
from quire.kernels.triton.recurrent import delta as recurrent_delta
from quire.kernels.triton.recurrent import scan as recurrent_scan
from quire.kernels.triton.recurrent import selective as recurrent_selective
from quire.kernels.triton.recurrent import ssd as recurrent_ssd
from quire.kernels.triton.recurrent.chunks import Tiles, choose_tiles
from quire.kernels.types import DeltaWeights, SsdWeights

PAGE = 64 if SMALL else 512
BOUND = 1e-3 if SMALL else 1e-4
"""Of errors. The interpreter does not round to bfloat16, it cuts off."""
RESULTS: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Heads, the keys (or groups of B and C) that they share, numbers of a state and channels of a head. Mamba's channels are
    those of all heads."""

    op: str
    heads: int
    keys: int
    size: int
    width: int

    @property
    def is_mamba(self) -> bool:
        return self.op == "selective_scan"

    @property
    def out(self) -> tuple[int, ...]:
        return (self.heads * self.width,) if self.is_mamba else (self.heads, self.width)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.size, *self.out) if self.is_mamba else (self.heads, self.size, self.width)

    @property
    def inputs(self) -> list[tuple[int, ...]]:
        keys, heads = (self.keys, self.size), (self.heads,)
        if self.is_mamba:
            return [self.out, self.out, keys[1:], keys[1:]]
        return [self.out, heads, keys, keys] if self.op == "ssd_scan" else [keys, keys, self.out, heads, heads]

    def weights(self) -> tuple[Any, ...]:
        """Decays of 0.9 to 0.9999 a token, about."""
        a = -torch.rand(self.state[: 2 if self.is_mamba else 1], device=DEVICE) * 0.1
        if self.is_mamba:
            return a, torch.randn_like(a[0])
        bias = torch.randn(self.heads, device=DEVICE) - 1
        return (SsdWeights(a, torch.randn_like(a), bias) if self.op == "ssd_scan" else DeltaWeights(a, bias),)

    @property
    def module(self) -> Any:
        modules = {"selective_scan": recurrent_selective, "ssd_scan": recurrent_ssd}
        return modules.get(self.op, recurrent_delta)

    @property
    def tiles(self) -> Tiles:
        return self.module.WIDE if self.is_mamba else choose_tiles(self.module.HOPPER, self.module.OTHERS)

    def by_token(self) -> Callable[..., None]:
        return recurrent_scan.__dict__[self.op]

    def by_chunks(self, tiles: Tiles) -> Callable[..., None]:
        names = {"selective_scan": "launch_selective_chunks", "ssd_scan": "launch_ssd_chunks"}
        launch = getattr(self.module, names.get(self.op, "launch_delta_chunks"))
        return lambda *arguments: launch(*arguments, fewest=1, tiles=tiles)


LAYERS = {
    "small Mamba": Layer("selective_scan", 1, 1, 5, 40),
    "small Mamba-2": Layer("ssd_scan", 2, 1, 12, 16), "small delta rule": Layer("gated_delta_rule", 2, 1, 12, 16),
} if SMALL else {
    "Mamba 2.8B": Layer("selective_scan", 80, 1, 16, 64), "FalconMamba 7B": Layer("selective_scan", 128, 1, 16, 64),
    "Mamba-2 2.7B": Layer("ssd_scan", 80, 1, 128, 64), "Nemotron-H 8B": Layer("ssd_scan", 128, 8, 128, 64),
    "Bamba 9B": Layer("ssd_scan", 128, 1, 128, 64), "Qwen3-Next": Layer("gated_delta_rule", 32, 16, 128, 128),
}  # fmt: skip
CHECKED = [(0, 70), (3, 33)] if SMALL else [(0, 300), (37, 200), (500, 30), (0, 64)]
"""Requests of one step: tokens before it, tokens in it."""
LENGTHS, BATCHES = (8, 16, 32, 48, 64, 512, 2048, 8192), (1, 4, 16)
MOST_TOKENS = 1 << 16
TUNED = (1, 2048), (8, 512)
"""Requests and tokens of each that tiles are tried with."""
MAMBA_TILES = [Tiles(*sizes, num_stages=1) for sizes in (
    (64, 32, 4), (32, 32, 4), (64, 32, 8), (128, 32, 8), (64, 16, 2), (32, 16, 2), (64, 16, 4), (128, 16, 4), (32, 64, 4)
)]  # fmt: skip
"""Groups of a chunk: 32 times warps / channels."""


class Step:
    """Requests of a layer, with random tokens; the states before them are random too."""

    def __init__(self, layer: Layer, work: list[tuple[int, int]]) -> None:
        counts = [count for _, count in work]
        pages = max(-(-(done + count) // PAGE) for done, count in work)
        starts = torch.tensor([0, *counts]).cumsum(0)
        tokens = int(starts[-1])
        self.metadata = AttentionMetadata(
            block_size=PAGE,
            query_start=starts.int().to(DEVICE),
            seq_lens=torch.tensor([done + count for done, count in work]).int().to(DEVICE),
            rows=torch.arange(len(work)).int().to(DEVICE),
            block_table=(torch.randperm(len(work) * pages) + 1).view(-1, pages).int().to(DEVICE),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            positions=torch.zeros(1, dtype=torch.int32),
            shape=torch.tensor([tokens, len(work), max(counts), 0]).to(DEVICE),
            num_tokens=tokens,
            num_requests=len(work),
            max_query_len=max(counts),
        )
        self.states = torch.randn(len(work) * pages + 1, *layer.state, device=DEVICE) * 0.3
        inputs = [torch.randn(tokens, *shape, device=DEVICE).bfloat16() for shape in layer.inputs]
        self.arguments = (*inputs, *layer.weights())
        self.out = torch.empty(tokens, *layer.out, device=DEVICE, dtype=torch.bfloat16)

    def run(self, function: Callable[..., None]) -> None:
        function(*self.arguments, self.states, self.metadata, self.out)


def check() -> None:
    """Outputs in float32 and states, against float64; bfloat16 itself would be 2e-3 off."""
    for name, layer in LAYERS.items():
        step = Step(layer, CHECKED)
        exact = step.states.double(), torch.empty_like(step.out, dtype=torch.float64)
        with in_float64():
            getattr(reference, layer.op)(*step.arguments, exact[0], step.metadata, exact[1])
        chosen = layer.module.__dict__[layer.op]
        ways = {"by token": layer.by_token(), "by chunks": layer.by_chunks(layer.tiles), "as chosen": chosen}
        for way, function in ways.items():
            got = step.states.clone(), torch.full_like(step.out, float("nan"), dtype=torch.float32)
            function(*step.arguments, got[0], step.metadata, got[1])
            pairs = zip(got, exact, strict=True)
            errors = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
            RESULTS.setdefault("errors", {}).setdefault(name, {})[way] = errors
            verdict = "" if all(error < BOUND for error in errors) else "  WRONG"
            print(f"{name}, {way}: states {errors[0]:.1e}, outputs {errors[1]:.1e}{verdict}", flush=True)


def time_ways() -> None:
    """A layer's scan, token by token and by chunks."""
    for name, layer in LAYERS.items():
        print(f"{name}, µs{'':20}" + "".join(f"{length:>10}" for length in LENGTHS) + "   tokens a request")
        for batch in BATCHES:
            lengths = [length for length in LENGTHS if batch * length <= MOST_TOKENS]
            for way, function in (("by token", layer.by_token()), ("by chunks", layer.by_chunks(layer.tiles))):
                taken = {}
                for length in lengths:
                    step = Step(layer, [(0, length)] * batch)
                    taken[length] = microseconds(lambda step=step, function=function: step.run(function))
                RESULTS.setdefault("microseconds", {}).setdefault(name, {})[f"{batch} requests, {way}"] = taken
                print(
                    f"{f'{batch} requests, {way}':29}" + "".join(f"{each:10.1f}" for each in taken.values()), flush=True
                )
            torch.cuda.empty_cache()


def tune() -> None:
    """Other tiles than the chosen ones."""
    for name in os.environ["TUNE"].split(","):
        layer = LAYERS[name]
        variants = MAMBA_TILES if layer.is_mamba else [
            Tiles(chunk, channels, warps, stages)
            for chunk in (32, 64)
            for channels in (32, 64)
            for warps in (4, 8)
            for stages in (1, 2)
        ]  # fmt: skip
        for batch, length in TUNED:
            step, rows = Step(layer, [(0, length)] * batch), []
            for tiles in variants:
                way = layer.by_chunks(tiles)
                print(f"  {tiles}", flush=True)  # so that a fault is some tiles'
                taken = microseconds(lambda step=step, way=way: step.run(way))
                rows.append((*dataclasses.astuple(tiles), taken))
            rows.sort(key=lambda row: row[-1])
            RESULTS.setdefault("tuning", {})[f"{name}, {batch} of {length}"] = rows
            print(f"{name}, {batch} of {length} tokens (chunk, channels, warps, stages, µs): {rows}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    check()
    if not SMALL:
        RESULTS["device"] = torch.cuda.get_device_name()
        if "TUNE" in os.environ:
            tune()
        else:
            time_ways()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "recurrent.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
