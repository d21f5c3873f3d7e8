"""`quire bench throughput`: many requests at once, offline: tokens a second."""

import argparse
import time
from typing import Any

from quire.benchmarks import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The requests, and the engine's flags."""
    from quire.engine.arg_utils import EngineArgs

    common.add_length_arguments(parser, input_len=256, output_len=64)
    parser.add_argument("--num-prompts", type=common.positive, default=128, help="requests (128)")
    parser.add_argument("--n", type=common.positive, default=1, help="answers a prompt (1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (1.0)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    EngineArgs.add_cli_args(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, give the figures."""
    from quire import SamplingParams

    llm = common.load_engine(args)
    config = llm.llm_engine.config
    inputs = common.random_lengths(args.num_prompts, args.input_len, args.range_ratio, args.bench_seed)
    outputs = common.random_lengths(args.num_prompts, args.output_len, args.range_ratio, args.bench_seed + 1)
    tokens = common.random_prompts(args.num_prompts, inputs, config.model.vocab_size, args.bench_seed, args.prefix_len)
    prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
    params = [
        SamplingParams(n=args.n, temperature=args.temperature, max_tokens=length, ignore_eos=True) for length in outputs
    ]
    warm_up = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([{"prompt_token_ids": tokens[0][::-1]}], warm_up, use_tqdm=False)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=not args.no_progress)
    seconds = time.perf_counter() - began
    num_inputs = sum(len(prompt) for prompt in tokens)
    num_outputs = sum(len(choice.token_ids) for answer in answers for choice in answer.outputs)
    figures: dict[str, Any] = {
        "model": common.model_name(config.model.model),
        "dtype": config.model.dtype,
        "num_requests": len(prompts),
        "input_tokens": num_inputs,
        "output_tokens": num_outputs,
        "seconds": seconds,
        "requests_per_second": len(prompts) / seconds,
        "output_tokens_per_second": num_outputs / seconds,
        "total_tokens_per_second": (num_inputs + num_outputs) / seconds,
        "machine": common.machine(),
    }
    common.print_table(
        f"Throughput: {config.model.model} ({config.model.dtype})",
        [
            (name.replace("_", " "), value)
            for name, value in figures.items()
            if name not in ("model", "dtype", "machine")
        ],
    )
    return figures
