"""`quire bench latency`: one batch at a time, offline: seconds a batch, first token, and milliseconds a step."""

import argparse
import time
from typing import Any

from quire.benchmarks import common
from quire.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The batch, and the engine's flags."""
    parser.add_argument("--input-len", type=common.positive, default=32, help="tokens a prompt (32)")
    parser.add_argument("--output-len", type=common.positive, default=128, help="tokens an answer (128)")
    parser.add_argument("--prefix-len", type=int, default=0, help="leading tokens that all prompts share (0)")
    parser.add_argument("--bench-seed", type=int, default=0, help="seed of the prompts (0)")
    parser.add_argument("--batch-size", type=common.positive, default=8, help="requests at once (8)")
    parser.add_argument("--n", type=common.positive, default=1, help="answers a prompt (1)")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches before measuring (10)")
    parser.add_argument("--num-iters", type=common.positive, default=30, help="batches that are measured (30)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (1.0)")
    parser.add_argument("--use-beam-search", action="store_true", help="beam search of width n")
    parser.add_argument(
        "--profile", action="store_true", help="in place of measuring, write a profile of one batch (--profiler-config)"
    )
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")
    common.add_engine_arguments(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, give the figures."""
    llm = common.load_engine(args)
    config = llm.llm_engine.config
    lengths = [args.input_len] * args.batch_size

    def batch(seed: int, output_len: int) -> float:
        tokens = common.random_prompts(args.batch_size, lengths, config.model.vocab_size, seed, args.prefix_len)
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
        began = time.perf_counter()
        _run(llm, args, prompts, output_len)
        return time.perf_counter() - began

    if args.profile and config.observability.profiler is None:
        setting = '{"profiler": "torch", "torch_profiler_dir": FOLDER}'
        raise ConfigError(f"profile: there is no profiler; give --profiler-config '{setting}'.", setting="profile")
    seeds = iter(range(args.bench_seed, 1 << 30))
    for _ in range(args.num_iters_warmup):
        batch(next(seeds), args.output_len)
    if args.profile:
        llm.start_profile()
        batch(next(seeds), args.output_len)
        files = llm.stop_profile()
        print("\n".join(("Profile of one batch:", *files)))
        return {"model": common.model_name(config.model.model), "files": files}
    whole: list[float] = []
    first: list[float] = []
    for _ in common.progress(range(args.num_iters), args.num_iters, "batches"):
        first.append(batch(next(seeds), 1))
        whole.append(batch(next(seeds), args.output_len))
    steps = [(total - start) * 1000 / max(1, args.output_len - 1) for total, start in zip(whole, first, strict=True)]
    figures: dict[str, Any] = {
        "model": common.model_name(config.model.model),
        "dtype": config.model.dtype,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "batch_seconds": common.summary(whole),
        "first_token_seconds": common.summary(first),
        "step_ms": common.summary(steps),
        "avg_latency": sum(whole) / len(whole),
        "latencies": whole,
        "percentiles": {str(share): common.percentile(whole, share) for share in (10, 25, 50, 75, 90, 99)},
        "machine": common.machine(),
    }
    header = ("", "mean", "p50", "p90", "p99", "min", "max")
    rows = [
        [label, *(figures[name][column] for column in header[1:])]
        for label, name in (
            ("batch, s", "batch_seconds"),
            ("first token, s", "first_token_seconds"),
            ("further step, ms", "step_ms"),
        )
    ]
    shape = f"batch {args.batch_size}, {args.input_len} in, {args.output_len} out"
    common.print_columns(f"Latency: {config.model.model} ({config.model.dtype}), {shape}", header, rows)
    print(f"Avg latency: {figures['avg_latency']} seconds")  # these lines are what scripts written for vLLM read
    for share, seconds in figures["percentiles"].items():
        print(f"{share}% percentile latency: {seconds} seconds")
    return figures


def _run(llm: Any, args: argparse.Namespace, prompts: list[Any], output_len: int) -> None:
    from quire import SamplingParams
    from quire.sampling_params import BeamSearchParams

    if args.use_beam_search:
        llm.beam_search(prompts, BeamSearchParams(beam_width=args.n, max_tokens=output_len, ignore_eos=True))
        return
    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )
    llm.generate(prompts, params, use_tqdm=False)
