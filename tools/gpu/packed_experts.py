"""Experts as codes on one GPU beside bfloat16: whole models' mixtures, checked, and timed by the number of tokens.

`python3 tools/gpu/packed_experts.py` with PYTHONPATH=src. Prints tables; writes $OUT/packed_experts.json. Several layers run one
after another in a CUDA graph, so that the cache holds none of them; experts are drawn evenly. TUNE=1 tries other blocks too.
Without a GPU (TRITON_INTERPRET=1) small mixtures are checked, and nothing is timed.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from packed import DEVICE, RESULTS, SMALL, microseconds, packed_weight
from tests.oracles.operations import experts as reference

from quire.kernels.packed import dequantize
from quire.kernels.triton.experts import configs as moe_configs
from quire.kernels.triton.experts import mixture as moe
from quire.kernels.triton.experts.packed import PackedConfig, choose, pack_expert_codes
from quire.kernels.types import ClampedSwiglu, ExpertCodes, ExpertScratch, ExpertWeights, PackedWeight

LAYERS = 1 if SMALL else 3
TOKENS = (1, 8, 64, 512, 4096)


@dataclasses.dataclass(frozen=True)
class Model:
    """A mixture's numbers; `codes` are the arguments of `packed_weight`."""

    experts: int
    top_k: int
    hidden: int
    width: int
    codes: dict[str, Any]
    is_gpt_oss: bool = False


MXFP4 = {"bits": 4, "group": 32, "table": "e2m1"}
INT4 = {"bits": 4, "group": 128, "zeros": True}
MODELS = {
    "gpt-oss-20b, MXFP4": Model(32, 4, 2880, 2880, MXFP4, True),
    "gpt-oss-120b, MXFP4": Model(128, 4, 2880, 2880, MXFP4, True),
    "Qwen3-30B-A3B, int4": Model(128, 8, 2048, 768, INT4),
    "Qwen3-30B-A3B, int8": Model(128, 8, 2048, 768, {"bits": 8, "group": 128}),
}
if SMALL:
    MODELS = {
        "MXFP4": Model(4, 2, 96, 64, MXFP4, True),
        "int4": Model(4, 2, 128, 128, INT4),
    }


class Mixture:
    """One layer: as codes and, unless that is too much, as the same values in bfloat16."""

    def __init__(self, model: Model, has_values: bool) -> None:
        stacks, values = [], []
        for rows, columns in ((2 * model.width, model.hidden), (model.hidden, model.width)):
            each: list[PackedWeight] = []
            for _ in range(model.experts):
                weight = packed_weight(rows, columns, **model.codes)
                scale = cast(torch.Tensor, weight.scale) / columns**0.5
                weight.scale = torch.exp2(scale.log2().round()) if model.is_gpt_oss else scale.half().float()
                each.append(weight)
            if has_values:
                values.append(torch.stack([dequantize(weight).bfloat16() for weight in each]))
            stacks.append(cast(ExpertCodes, pack_expert_codes(each, is_gated=rows == 2 * model.width)))
        more: dict[str, Any] = {}
        if model.is_gpt_oss:
            biases = (torch.randn(model.experts, rows, device=DEVICE) for rows in (2 * model.width, model.hidden))
            more = dict(zip(("gate_up_bias_E2I", "down_bias_ED"), biases, strict=True))
            more["clamp"] = ClampedSwiglu(1.702, 7.0)
        shapes = (stack.shape_only() for stack in stacks)
        self.codes = ExpertWeights(*shapes, gate_up_codes=stacks[0], down_codes=stacks[1], **more)
        self.values = ExpertWeights(*values, **more) if has_values else None
        self.num_bytes = sum(
            part.numel() * part.element_size()
            for stack in stacks
            for part in (stack.packed, stack.scale)
            if part is not None
        )


class Step:
    """A step's tokens, and what they chose."""

    def __init__(self, model: Model, rows: int) -> None:
        self.x_TD = torch.randn(rows, model.hidden, device=DEVICE).bfloat16()
        self.ids_TK = torch.rand(rows, model.experts, device=DEVICE).argsort(-1)[:, : model.top_k].int().contiguous()
        self.weights_TK = torch.rand(rows, model.top_k, device=DEVICE)
        self.num_tokens = torch.tensor([rows], device=DEVICE)
        self.scratch = ExpertScratch(
            capacity=rows, num_experts=model.experts, top_k=model.top_k, hidden=model.hidden, intermediate=model.width,
            dtype=torch.bfloat16, device=DEVICE,
        )  # fmt: skip
        self.hit = self.ids_TK.unique().numel()

    def run(self, function: Any, experts: ExpertWeights) -> torch.Tensor:
        out_TD = torch.empty_like(self.x_TD)
        function(
            self.x_TD, self.ids_TK, self.weights_TK, experts, "silu", self.num_tokens, out_TD, self.scratch
        )  # fmt: skip
        return out_TD


def check(name: str, model: Model, layer: Mixture) -> None:
    """The fast and the invariant way beside the reference with the values in bfloat16."""
    assert layer.values is not None
    for rows in (1, 5) if SMALL else (1, 2, 8, 40, 300, 2000):
        step = Step(model, rows)
        expected = step.run(reference.moe_experts, layer.values).float()
        for way, function in (
            ("fast", moe.moe_experts),
            ("invariant", functools.partial(moe.moe_experts, is_invariant=True)),
        ):
            error = float((step.run(function, layer.codes).float() - expected).norm() / expected.norm())
            RESULTS.setdefault("errors", {})[f"{name}, {rows} tokens, {way}"] = error
            print(
                f"{name}, {rows} tokens, {way}: relative error {error:.5f}{'' if error < 0.02 else '  WRONG'}",
                flush=True,
            )


def time_tokens(name: str, model: Model, layers: list[Mixture]) -> None:
    """Microseconds a layer, and the speed at which codes of the experts that were hit are read."""
    print(f"{name}: {layers[0].num_bytes / 1e6:.0f} MB a layer in codes")
    for rows in TOKENS:
        step = Step(model, rows)
        taken: dict[str, float] = {}
        for form in ("codes", "values"):
            experts = [getattr(layer, form) for layer in layers]
            if None not in experts:
                taken[form] = microseconds(
                    lambda e=experts, s=step: [s.run(moe.moe_experts, each) for each in e], LAYERS
                )  # type: ignore[misc]
        read = layers[0].num_bytes * step.hit / model.experts / taken["codes"] / 1e3
        RESULTS.setdefault("microseconds", {}).setdefault(name, {})[rows] = taken
        times = ", ".join(f"{form} {each:.1f} µs" for form, each in taken.items())
        print(f"  {rows:5} tokens, {step.hit:3} experts: {times}; codes at {read:.0f} GB/s", flush=True)


def tune(name: str, model: Model, layers: list[Mixture]) -> None:
    """Blocks of `packed_experts_kernel`, for each number of tokens."""
    ways = [PackedConfig(block, stages, splits=True) for block in (8, 16) for stages in (2, 3, 4)]
    ways += [PackedConfig(block, stages, splits=True, scales_codes=True) for block in (16, 32) for stages in (3, 4)]
    ways += [PackedConfig(block, stages, 4, scales_codes=True) for block in (32, 64) for stages in (2, 3, 4)]
    ways += [PackedConfig(block, stages, 8, scales_codes=True) for block in (64, 128, 256) for stages in (2, 3)]
    usual = moe_configs.choose
    for rows in TOKENS:
        step, found = Step(model, rows), []
        for way in ways:
            if way.block_t > 4 * max(rows * model.top_k // model.experts, 8):
                continue
            moe_configs.choose = lambda *_, way=way: dataclasses.replace(moe_configs.INVARIANT, packed=way)  # type: ignore[assignment]
            try:
                taken = microseconds(lambda s=step: [s.run(moe.moe_experts, layer.codes) for layer in layers], LAYERS)  # type: ignore[misc]
            except Exception as error:
                print(f"  {way}: {type(error).__name__} {str(error)[:100]}")
                continue
            found.append((taken, dataclasses.astuple(way)))
        moe_configs.choose = usual
        found.sort()
        RESULTS.setdefault("tuning", {}).setdefault(name, {})[rows] = found
        chosen = dataclasses.astuple(choose(rows * model.top_k / model.experts))
        print(f"  {rows} tokens, now {chosen}: {[(f'{taken:.1f}', *way) for taken, way in found[:4]]}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for name, model in MODELS.items():
        has_values = "120b" not in name  # 12 GiB a layer
        layers = [Mixture(model, has_values) for _ in range(LAYERS)]
        if has_values:
            check(name, model, layers[0])
        if not SMALL:
            time_tokens(name, model, layers)
            if "TUNE" in os.environ:
                tune(name, model, layers)
            del layers
            torch.cuda.empty_cache()
    if not SMALL:
        RESULTS["device"] = torch.cuda.get_device_name()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "packed_experts.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
