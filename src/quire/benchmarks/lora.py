"""`quire bench lora`: a step's time with none, one and many adapters in a batch, beside the base model's, in one engine.

Adapters have random numbers: how fast they are does not depend on what they say.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

from quire.adapters import LoRARequest
from quire.benchmarks import common

FLAGS: common.Flags = (
    ("--batch-sizes", [1, 32], "requests at once", {"type": int, "nargs": "+"}),
    ("--adapters", [1, 8], "adapters in a batch; requests take turns", {"type": int, "nargs": "+"}),
    ("--ranks", [16, 64], "ranks of the adapters", {"type": int, "nargs": "+"}),
    ("--targets", [], "last parts of names of matrices; none: every matrix of the layers", {"nargs": "*"}),
    ("--input-len", 32, "tokens a prompt"),
    ("--output-len", 64, "steps that are measured"),
    ("--num-iters", 5, "measurements of each", {"type": int}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_flags(parser, {"": FLAGS})
    common.add_engine_arguments(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    args.enable_lora = True
    llm = common.load_engine(args)
    config, rows = llm.llm_engine.config, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as folder:
        for rank, batch in itertools.product(args.ranks, args.batch_sizes):
            requests = _adapters(llm, folder, args, rank)
            base = _step_ms(llm, args, batch, [None])
            for count in args.adapters:
                if count <= batch or count == min(args.adapters):
                    step_ms = _step_ms(llm, args, batch, requests[:count])
                    again = _step_ms(llm, args, batch, [None])
                    lowest = min(base, again)
                    row = {"rank": rank, "batch_size": batch, "adapters": count, "base_step_ms": lowest}
                    rows.append(row | {"step_ms": step_ms, "ratio": step_ms / lowest})
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


def _step_ms(llm: Any, args: argparse.Namespace, batch: int, adapters: list[LoRARequest | None]) -> float:
    """Milliseconds of a step in which every request of a batch gets one token: the median."""
    from quire import SamplingParams

    vocab = llm.llm_engine.config.model.vocab_size
    seeds, chosen = itertools.count(), [adapters[index % len(adapters)] for index in range(batch)]

    def seconds(output_len: int) -> float:
        tokens = common.random_prompts(batch, [args.input_len] * batch, vocab, next(seeds), 0)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        return time.perf_counter() - began

    for _ in range(3):
        seconds(8)
    steps = [seconds(args.output_len + 8) - seconds(8) for _ in range(args.num_iters)]
    return statistics.median(steps) * 1000 / args.output_len
