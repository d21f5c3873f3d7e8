"""`quire bench latency`: one batch at a time, offline: seconds a batch, first token, and milliseconds a step."""

import argparse
import time
from typing import Any

from quire.benchmarks import common
from quire.engine.arg_parser import Flags
from quire.errors import ConfigError

FLAGS: Flags = (
    ("--input-len", 32, "tokens a prompt"),
    ("--output-len", 128, "tokens an answer"),
    ("--prefix-len", 0, "leading tokens that all prompts share"),
    ("--bench-seed", 0, "seed of the prompts"),
    ("--batch-size", 8, "requests at once"),
    ("--n", 1, "answers a prompt"),
    ("--num-iters-warmup", 10, "batches before measuring", {"type": int}),
    ("--num-iters", 30, "batches that are measured"),
    ("--temperature", 1.0, "sampling temperature"),
    ("--use-beam-search", False, "beam search of width n"),
    ("--profile", False, "in place of measuring, write a profile of one batch (--profiler-config)"),
    ("--disable-detokenize", False, "make no text of the tokens"),
)

add_arguments = common.with_engine({"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
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
        raise ConfigError.of("profile", f"there is no profiler; give --profiler-config '{setting}'.")
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
    figures = {"model": common.model_name(config.model.model), "dtype": config.model.dtype}
    figures |= _figures(args, whole, first)
    _print(figures, config.model.model)
    return figures


def _figures(args: argparse.Namespace, whole: list[float], first: list[float]) -> dict[str, Any]:
    """The figures of batches. `whole`, `first`: seconds of each batch, and of one token of each."""
    steps = [(total - start) * 1000 / max(1, args.output_len - 1) for total, start in zip(whole, first, strict=True)]
    return {
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


def _print(figures: dict[str, Any], model: str) -> None:
    shape = f"batch {figures['batch_size']}, {figures['input_len']} in, {figures['output_len']} out"
    shown = {"batch, s": "batch_seconds", "first token, s": "first_token_seconds", "further step, ms": "step_ms"}
    common.print_summaries(
        f"Latency: {model} ({figures['dtype']}), {shape}",
        {label: figures[name] for label, name in shown.items()},
        ("mean", "p50", "p90", "p99", "min", "max"),
    )
    print(f"Avg latency: {figures['avg_latency']} seconds")  # these lines are what scripts written for vLLM read
    for share, seconds in figures["percentiles"].items():
        print(f"{share}% percentile latency: {seconds} seconds")


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
