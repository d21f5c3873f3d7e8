"""`quire bench lora`: a step's time with one and many adapters in a batch, beside the base model's, in one engine.

Rounds are pairs: the base and the adapters one right after the other, each of them first in turn. The ratio is the median of
the rounds' own, so that what else a machine does matters little. Adapters have random numbers: how fast they are does not depend
on what they say.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from quire.adapters import LoRARequest
from quire.benchmarks import common
from quire.engine.arg_parser import Flags

FLAGS: Flags = (
    ("--batch-sizes", [1, 32], "requests at once", {"type": int, "nargs": "+"}),
    ("--adapters", [1, 8], "adapters in a batch; requests take turns", {"type": int, "nargs": "+"}),
    ("--ranks", [16, 64], "ranks of the adapters", {"type": int, "nargs": "+"}),
    ("--targets", [], "last parts of names of matrices; none: every matrix of the layers", {"nargs": "*"}),
    ("--input-len", 32, "tokens a prompt"),
    ("--output-len", 64, "steps that are measured"),
    ("--num-iters", 5, "measurements of each", {"type": int}),
)

add_arguments = common.with_engine({"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    args.enable_lora = True
    llm = common.load_engine(args)
    config, rows = llm.llm_engine.config, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as folder:
        for rank, batch in itertools.product(args.ranks, args.batch_sizes):
            requests = _adapters(llm, folder, args, rank)
            for count in args.adapters:
                if count <= batch or count == min(args.adapters):
                    row = {"rank": rank, "batch_size": batch, "adapters": count}
                    rows.append(row | _compare(llm, args, batch, requests[:count]))
    header = ("rank", "batch", "adapters", "base, ms", "with, ms", "ratio")
    shown = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    common.print_columns(f"A step with adapters: {config.model.model} ({config.model.dtype})", header, shown)
    model = common.model_name(config.model.model)
    return {"model": model, "dtype": config.model.dtype, "rows": rows, "machine": common.machine()}


def _adapters(llm: Any, folder: str, args: argparse.Namespace, rank: int) -> list[LoRARequest | None]:
    """As many as a batch may have."""
    made: list[LoRARequest | None] = []
    for number in range(1, max(args.adapters) + 1):
        path = f"{folder}/{rank}-{number}"
        llm.collective_rpc("write_random_adapter", args=(path, rank, number, args.targets))
        made.append(LoRARequest(f"rank{rank}-{number}", number, path))
    return made


def _compare(
    llm: Any, args: argparse.Namespace, batch: int, adapters: Sequence[LoRARequest | None]
) -> dict[str, float]:
    """Milliseconds of a step in which every request of a batch gets one token, without and with adapters, in paired rounds."""
    seeds, none = itertools.count(), [None]
    sides: tuple[Sequence[LoRARequest | None], ...] = (none, adapters)
    for side in sides * 2:
        _seconds(llm, args, batch, side, 8, next(seeds))
    rounds: list[tuple[float, float]] = []
    for number in range(args.num_iters):
        measured = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            long = _seconds(llm, args, batch, sides[which], args.output_len + 8, next(seeds))
            measured[which] = (long - _seconds(llm, args, batch, sides[which], 8, next(seeds))) * 1000 / args.output_len
        rounds.append((measured[0], measured[1]))
    base, step = (statistics.median(side) for side in zip(*rounds, strict=True))
    return {"base_step_ms": base, "step_ms": step, "ratio": statistics.median(one / zero for zero, one in rounds)}


def _seconds(
    llm: Any, args: argparse.Namespace, batch: int, adapters: Sequence[LoRARequest | None], output_len: int, seed: int
) -> float:
    """Of a batch whose requests take turns with the adapters."""
    from quire import SamplingParams

    chosen = [adapters[index % len(adapters)] for index in range(batch)]
    tokens = common.random_prompts(batch, [args.input_len] * batch, llm.llm_engine.config.model.vocab_size, seed, 0)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    return time.perf_counter() - began
