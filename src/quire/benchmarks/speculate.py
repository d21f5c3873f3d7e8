"""`quire bench speculate`: the same requests with speculation and without, in turns: tokens a second, guesses, equal tokens.

Patterns: `copy` prompts say one text over and over, as an answer does that quotes or edits its input; `random` prompts are
answered with random draws, so that hardly a guess is right (a model that repeats itself is guessed for there, too); `stories`
are chats that ask for one each, for models that guess: answers end where they end. Prompts are computed before the clock starts.
"""

import argparse
import random
import statistics
import time
from typing import Any

from quire.benchmarks import common
from quire.engine.arg_parser import Flags
from quire.errors import ConfigError

PASSAGE = (
    "The river rises in the hills and runs south for ninety miles before it meets the sea. Farmers on its banks grow wheat and "
    "barley, and in spring the water stands in the lower fields. A stone bridge of seven arches crosses it at the old market "
    "town, where boats from the coast used to unload salt, timber and wool."
)
TOPICS = ("fox", "river", "clock", "king", "baker", "sailor", "robot", "garden", "bridge", "winter", "teacher", "owl")
FLAGS: Flags = (
    ("--pattern", "copy", "copy, random or stories", {"choices": ("copy", "random", "stories")}),
    ("--batch-sizes", "1,8,32", "requests at once, with commas"),
    ("--input-len", 512, "tokens a prompt"),
    ("--output-len", 256, "tokens an answer"),
    ("--rounds", 3, "measured batches of each size, with speculation and without in turns"),
    ("--temperature", 0.0, "sampling temperature of copies; random prompts are answered with 1"),
    ("--bench-seed", 0, "seed of the prompts"),
)

add_arguments = common.with_engine({"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    if args.speculative_config is None and args.spec_method is None and args.spec_model is None:
        args.speculative_config = "auto"
    engines = {"with": common.load_engine(args), "without": _without(args)}
    config = engines["with"].llm_engine.config
    if config.speculative is None:
        raise ConfigError.of("speculative_config", "there is nothing to compare: this model is not speculated on.")
    figures: dict[str, Any] = {"model": common.model_name(config.model.model), "dtype": config.model.dtype}
    figures |= {"pattern": args.pattern, "input_len": args.input_len, "output_len": args.output_len}
    rows = [_compare(engines, args, int(size)) for size in args.batch_sizes.split(",")]
    _print(figures, rows)
    return figures | {"sizes": rows, "machine": common.machine()}


def _without(args: argparse.Namespace) -> Any:
    plain = {"speculative_config": None, "spec_method": None, "spec_model": None, "spec_tokens": None}
    return common.load_engine(argparse.Namespace(**vars(args) | plain))


def _prompts(llm: Any, args: argparse.Namespace, size: int, number: int) -> list[dict[str, Any]]:
    """Prompts of one batch; those of another number are others."""
    config, seed = llm.llm_engine.config, args.bench_seed + number
    lengths = [args.input_len] * size
    if args.pattern == "random":
        tokens = common.random_prompts(size, lengths, config.model.vocab_size, seed)
        return [{"prompt_token_ids": prompt} for prompt in tokens]
    source, prompts = random.Random(seed), []
    if args.pattern == "stories":
        return [_story(llm, f"{source.choice(TOPICS)} and the {source.choice(TOPICS)}") for _ in range(size)]
    for _ in range(size):
        words = PASSAGE.split()
        source.shuffle(words)
        passage = (
            common.random_tokens(source, 64, config.model.vocab_size)
            if config.model.tokenizer_path == ""
            else llm.get_tokenizer().encode(" ".join(words) + " ")
        )
        prompts.append({"prompt_token_ids": (passage * (1 + args.input_len // len(passage)))[: args.input_len]})
    return prompts


def _story(llm: Any, topic: str) -> dict[str, Any]:
    """A chat that asks for a story."""
    messages = [{"role": "user", "content": f"Write a long story about the {topic}."}]
    return {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)}


def _compare(engines: dict[str, Any], args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Batches of a size, on both engines in turns; the first of each is for warmth."""
    from quire import SamplingParams

    temperature = 1.0 if args.pattern == "random" else args.temperature
    to_the_end = args.pattern != "stories"
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.output_len, ignore_eos=to_the_end)
    one = SamplingParams(max_tokens=1)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[Any]] = {name: [] for name in engines}
    before = engines["with"].call("stats")
    for number in range(args.rounds + 1):
        for name in engines if number % 2 else reversed(engines):
            prompts = _prompts(engines[name], args, size, number)
            engines[name].generate(prompts, one, use_tqdm=False)  # from here on the prompts are cached
            began = time.perf_counter()
            outputs = engines[name].generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens[name] += [output.outputs[0].token_ids for output in outputs]
            if number:
                rates[name].append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    after = engines["with"].call("stats")
    drafts, guessed = after.num_drafts - before.num_drafts, after.num_draft_tokens - before.num_draft_tokens
    accepted = sum(after.accepted_per_position) - sum(before.accepted_per_position)
    pairs = zip(rates["with"], rates["without"], strict=True)
    ratios = [one / other for one, other in pairs]
    return {
        "batch_size": size,
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "accepted_share": round(accepted / guessed, 3) if guessed else 0.0,
        "tokens_per_verification": round(1 + accepted / drafts, 2) if drafts else 1.0,
        "draft_tokens": guessed,
        "equal_answers": sum(map(list.__eq__, map(list, tokens["with"]), map(list, tokens["without"]))),
        "answers": len(tokens["with"]),
    }


def _print(figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    header = (
        "requests",
        "without, tokens/s",
        "with, tokens/s",
        "ratio",
        "guesses right",
        "tokens a verification",
        "equal",
    )
    lines = [
        (
            row["batch_size"],
            row["tokens_per_s"]["without"],
            row["tokens_per_s"]["with"],
            row["ratio"],
            row["accepted_share"],
            row["tokens_per_verification"],
            f"{row['equal_answers']} of {row['answers']}",
        )
        for row in rows
    ]
    title = f"{figures['model']}, {figures['pattern']}: {figures['input_len']} + {figures['output_len']} tokens"
    common.print_columns(title, header, lines)
