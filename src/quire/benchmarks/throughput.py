"""`quire bench throughput`: many requests at once, offline: tokens a second."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from quire.benchmarks import common, datasets
from quire.engine.arg_parser import Flags
from quire.errors import ConfigError

FLAGS: Flags = (
    ("--backend", "quire", "accepted for compatibility", {"choices": ("quire", "vllm")}),
    ("--bench-seed", 0, "seed of prompts and lengths"),
    ("--n", 1, "answers a prompt"),
    ("--temperature", 1.0, "sampling temperature"),
    ("--no-progress --disable-tqdm", False, "no progress bar"),
    ("--disable-detokenize", False, "make no text of the tokens"),
)

add_arguments = common.with_engine({**datasets.flags(num_prompts=1000, input_len=1024, output_len=128), "": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    from quire import SamplingParams

    llm = common.load_engine(args)
    config = llm.llm_engine.config

    def count_tokens(text: str) -> int:
        return len(llm.get_tokenizer().encode(text))

    samples = datasets.load_samples(args, args.bench_seed, config.model.vocab_size, count_tokens)
    detokenize = not args.disable_detokenize

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(
            n=args.n, temperature=args.temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=detokenize
        )

    run(llm, [samples[0].altered(0)], [params(2)], False)
    began = time.perf_counter()
    answers = run(llm, samples, [params(sample.output_len) for sample in samples], not args.no_progress)
    seconds = time.perf_counter() - began
    num_inputs = sum(len(answer.prompt_token_ids) for answer in answers)
    num_outputs = sum(len(choice.token_ids) for answer in answers for choice in answer.outputs)
    figures: dict[str, Any] = {
        "model": common.model_name(config.model.model),
        "dtype": config.model.dtype,
        "dataset_name": args.dataset_name,
        "num_requests": len(samples),
        "input_tokens": num_inputs,
        "output_tokens": num_outputs,
        "seconds": seconds,
        "requests_per_second": len(samples) / seconds,
        "output_tokens_per_second": num_outputs / seconds,
        "total_tokens_per_second": (num_inputs + num_outputs) / seconds,
    }
    shown = [(name.replace("_", " "), value) for name, value in figures.items() if name not in ("model", "dtype")]
    common.print_table(f"Throughput: {config.model.model} ({config.model.dtype})", shown)
    rates = [figures[f"{name}_per_second"] for name in ("requests", "total_tokens", "output_tokens")]
    print("Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s".format(*rates))
    print(f"Total num prompt tokens:  {num_inputs}\nTotal num output tokens:  {num_outputs}")
    vllms_names = {
        "elapsed_time": seconds,
        "total_num_tokens": num_inputs + num_outputs,
        "tokens_per_second": figures["total_tokens_per_second"],
    }
    return figures | vllms_names | {"machine": common.machine()}


def run(llm: Any, samples: Sequence[datasets.Sample], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
    """Answers to prompts of one kind, or to conversations.
    Raises ConfigError: prompts of token ids among conversations."""
    kinds = {sample.kind for sample in samples}
    if "messages" not in kinds:
        prompts = [
            {"prompt_token_ids": sample.prompt} if sample.kind == "ids" else {"prompt": sample.prompt}
            for sample in samples
        ]
        return llm.generate(prompts, list(params), use_tqdm=use_tqdm)
    if "ids" in kinds:
        raise ConfigError.of("dataset_path", "a file with `messages` cannot have prompts of token ids too.")
    conversations = [
        sample.prompt if sample.kind == "messages" else [{"role": "user", "content": sample.prompt}]
        for sample in samples
    ]
    return llm.chat(conversations, list(params), use_tqdm=use_tqdm)
