"""`python -m bench forms`: answers that follow a JSON schema beside free ones, offline, in rounds that alternate.

Prompts, lengths and seeds are the same; what counts is the whole time of a batch, once with the schema and once without, and the
median of the rounds' ratios. Tokens that a form leaves no choice about count as every token does: a caller waits for them, too.
"""

import argparse
import json
import statistics
import time
from typing import Any

from bench.grammars import records
from bench.tables import print_records

from quire.benchmarks import common
from quire.engine.arg_parser import flag, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32], help="requests at once")
    flag(parser, "--input-len", 64, "tokens a prompt")
    flag(parser, "--output-len", 128, "tokens an answer")
    flag(parser, "--rounds", 7, "rounds that are measured")
    flag(parser, "--bench-seed", 0, "seed of prompts and draws")
    flag(parser, "--temperature", 0.7, "sampling temperature")
    common.add_engine_arguments(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    from quire.sampling_params import StructuredOutputsParams

    llm = common.load_engine(args)
    config = llm.llm_engine.config
    schema, bounded = json.dumps(records(None, None)), json.dumps(records(24, 12))
    forms = {
        "compact": StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        "any whitespace": StructuredOutputsParams(json=schema),
        "compact, maxLength": StructuredOutputsParams(json=bounded, disable_any_whitespace=True),
        "any whitespace, maxLength": StructuredOutputsParams(json=bounded),
    }
    results = []
    for batch_size in args.batch_sizes:
        for name, form in forms.items():
            _seconds(llm, args, batch_size, form)  # compiles, captures
            _seconds(llm, args, batch_size, None)
            pairs = [
                (_seconds(llm, args, batch_size, form), _seconds(llm, args, batch_size, None))
                for _ in common.progress(range(args.rounds), args.rounds, f"{batch_size} requests, {name}")
            ]
            per_token = 1000 / args.output_len
            results.append(
                {
                    "batch_size": batch_size,
                    "form": name,
                    "ms_a_token": statistics.median(with_form for with_form, _ in pairs) * per_token,
                    "free_ms_a_token": statistics.median(free for _, free in pairs) * per_token,
                    "ratio": statistics.median(with_form / free for with_form, free in pairs),
                    "ratios": [with_form / free for with_form, free in pairs],
                }
            )
    columns = {
        "requests": "batch_size",
        "form": "form",
        "ms a token": "ms_a_token",
        "free": "free_ms_a_token",
        "ratio": "ratio",
    }
    print_records(f"Answers with a form: {config.model.model} ({config.model.dtype})", columns, results)
    return {
        "model": common.model_name(config.model.model),
        "dtype": config.model.dtype,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "results": results,
        "machine": common.machine(),
    }


def _seconds(llm: Any, args: argparse.Namespace, batch_size: int, form: Any) -> float:
    """Of one batch."""
    from quire import SamplingParams

    vocab_size = llm.llm_engine.config.model.vocab_size
    tokens = common.random_prompts(batch_size, [args.input_len] * batch_size, vocab_size, args.bench_seed, 0)
    params = [
        SamplingParams(
            temperature=args.temperature,
            seed=args.bench_seed + number,
            max_tokens=args.output_len,
            ignore_eos=True,
            structured_outputs=form,
        )
        for number in range(batch_size)
    ]
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in tokens], params, use_tqdm=False)
    return time.perf_counter() - began
