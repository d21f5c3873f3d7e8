"""The requests of a load: random tokens, shared prefixes, a ShareGPT file, a file of one's own.

Knows prompts and lengths. Knows nothing of servers, engines or times. A tokenizer is needed only where lengths of texts
are, and is given as a function that counts.
"""

import argparse
import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from quire.benchmarks.common import random_tokens
from quire.engine.arg_parser import Flags, bounded, human_int, positive
from quire.errors import ConfigError, refusing

DATASETS = ("random", "sharegpt", "prefix_repetition", "custom")
CountTokens = Callable[[str], int]

SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
"""Turns of fewer or more tokens are left out, as is usual with this data set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prompt: token ids, a text, or chat messages.
        prompt_len: its tokens; None for a text that was not counted.
        output_len: most tokens of its answer.
    """

    prompt: list[int] | str | list[dict[str, Any]]
    prompt_len: int | None
    output_len: int

    @property
    def kind(self) -> str:
        """`text`, `ids` or `messages`."""
        if isinstance(self.prompt, str):
            return "text"
        return "ids" if isinstance(self.prompt[0], int) else "messages"

    def altered(self, number: int) -> "Sample":
        """Alike in length and not in its beginning: warming up with it leaves the prefix cache as it was."""
        prompt: Any = self.prompt
        if self.kind == "text":
            altered = f"{number} {prompt}"
        elif self.kind == "ids":
            altered = [prompt[-1 - number % len(prompt)], *prompt[::-1][1:]]
        else:
            altered = [{"role": "system", "content": f"Warm-up {number}."}, *prompt]
        return dataclasses.replace(self, prompt=altered)


def flags(num_prompts: int, input_len: int, output_len: int) -> dict[str, Flags]:
    """The flags of data sets, with a benchmark's own defaults."""
    share = bounded(float, "a share from 0 to below 1", 0, math.nextafter(1, 0))
    count = bounded(human_int, "a whole number of 0 or above", 0)
    file_output = "tokens an answer; else as long as the file's"
    return {
        "Requests": (
            ("--dataset-name", "random", "where prompts come from", {"choices": DATASETS}),
            ("--dataset-path", None, "the file of sharegpt (JSON) or custom (JSON lines)", {"metavar": "PATH"}),
            ("--num-prompts", num_prompts, "requests"),
            ("--input-len", None, "tokens a prompt, whatever the data set makes", {"type": positive}),
            ("--output-len", None, "most tokens an answer, whatever the data set", {"type": positive}),
            ("--disable-shuffle", False, "keep a file's order"),
            ("--no-oversample", False, "never use an entry of a file twice"),
        ),
        "random": (
            ("--random-input-len", input_len, "tokens a prompt"),
            ("--random-output-len", output_len, "tokens an answer"),
            ("--random-range-ratio --range-ratio", 0.0, "lengths vary by this share either way", {"type": share}),
            ("--random-prefix-len --prefix-len", 0, "tokens that all prompts share, before the rest", {"type": count}),
        ),
        "prefix_repetition": (
            ("--prefix-repetition-prefix-len", 256, "tokens of a prefix"),
            ("--prefix-repetition-suffix-len", 256, "tokens after it"),
            ("--prefix-repetition-num-prefixes", 10, "different prefixes"),
            ("--prefix-repetition-output-len", 128, "tokens an answer"),
        ),
        "sharegpt and custom": (
            ("--sharegpt-output-len", None, file_output, {"type": positive}),
            ("--custom-output-len", 256, "tokens an answer; -1: each line's `output_tokens`", {"type": int}),
        ),
    }


def has_fixed_lengths(args: argparse.Namespace) -> bool:
    """Whether answers are meant to have exactly their length: of synthetic prompts, whose answers mean nothing."""
    return args.dataset_name in ("random", "prefix_repetition")


def load_samples(
    args: argparse.Namespace, seed: int, vocab_size: int, count_tokens: CountTokens | None
) -> list[Sample]:
    """The requests that the flags describe, `num_prompts` of them (or fewer, with `no_oversample`).
    Raises ConfigError: a file that is not there or not what it should be; a tokenizer that is needed and missing.

    Args:
        vocab_size: random ids stay below it.
        count_tokens: the tokens of a text; None if there is no tokenizer.
    """
    source = random.Random(seed)
    if args.dataset_name == "random":
        return _random(args, source, vocab_size)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, source, vocab_size)
    if not args.dataset_path:
        message = f"the data set {args.dataset_name!r} is a file; name it with --dataset-path."
        raise ConfigError.of("dataset_path", message)
    entries = _read(args.dataset_path, is_lines=args.dataset_name == "custom")
    if not args.disable_shuffle:
        source.shuffle(entries)
    is_sharegpt = args.dataset_name == "sharegpt"
    samples = _sharegpt(args, entries, count_tokens) if is_sharegpt else _custom(args, entries)
    if not samples:
        raise ConfigError.of("dataset_path", f"{args.dataset_path!r} has no usable entry.")
    if len(samples) < args.num_prompts and not args.no_oversample:
        samples += [source.choice(samples) for _ in range(args.num_prompts - len(samples))]
    return samples[: args.num_prompts]


def _length(source: random.Random, mean: int, ratio: float) -> int:
    return source.randint(max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio))))


def _random(args: argparse.Namespace, source: random.Random, vocab_size: int) -> list[Sample]:
    prefix = random_tokens(source, args.random_prefix_len, vocab_size)
    samples: list[Sample] = []
    for _ in range(args.num_prompts):
        length = _length(source, args.input_len or args.random_input_len, args.random_range_ratio)
        output_len = _length(source, args.output_len or args.random_output_len, args.random_range_ratio)
        prompt = prefix + random_tokens(source, length, vocab_size)
        samples.append(Sample(prompt, len(prompt), output_len))
    return samples


def _prefix_repetition(args: argparse.Namespace, source: random.Random, vocab_size: int) -> list[Sample]:
    """Each prefix is used equally often; the order is random."""
    num_prefixes = args.prefix_repetition_num_prefixes
    prefixes = [random_tokens(source, args.prefix_repetition_prefix_len, vocab_size) for _ in range(num_prefixes)]
    suffix_len = args.prefix_repetition_suffix_len
    if args.input_len is not None:
        suffix_len = max(1, args.input_len - args.prefix_repetition_prefix_len)
    output_len = args.output_len or args.prefix_repetition_output_len
    samples: list[Sample] = []
    for index in range(args.num_prompts):
        prompt = prefixes[index % num_prefixes] + random_tokens(source, suffix_len, vocab_size)
        samples.append(Sample(prompt, len(prompt), output_len))
    if not args.disable_shuffle:
        source.shuffle(samples)
    return samples


def _read(path: str, is_lines: bool) -> list[Any]:
    what = f"dataset_path: cannot read {path!r} as {'JSON lines' if is_lines else 'JSON'}"
    with refusing(OSError, ValueError, setting="dataset_path", what=what), open(path, encoding="utf-8") as file:
        if not is_lines:
            entries: Any = json.load(file)
        else:
            entries = [json.loads(line) for line in file if line.strip()]
    if not isinstance(entries, list):
        raise ConfigError.of("dataset_path", f"{path!r} must hold a JSON list of conversations.")
    return entries


def _sharegpt(args: argparse.Namespace, entries: Sequence[Any], count_tokens: CountTokens | None) -> list[Sample]:
    """The first turn of each conversation, and an answer as long as the second."""
    answer_len = args.output_len or args.sharegpt_output_len
    if count_tokens is None:
        raise ConfigError.of("tokenizer", "sharegpt is chosen by lengths in tokens; name its folder with --tokenizer.")
    samples: list[Sample] = []
    for entry in entries:
        turns = [str(turn.get("value", "")) for turn in (entry.get("conversations") or entry.get("conversation") or [])]
        if len(samples) == args.num_prompts:
            break
        if len(turns) < 2:
            continue
        prompt_len = count_tokens(turns[0])
        output_len = answer_len or count_tokens(turns[1])
        if min(prompt_len, output_len) < SHAREGPT_MIN_TOKENS and not (answer_len and prompt_len >= SHAREGPT_MIN_TOKENS):
            continue
        if prompt_len <= SHAREGPT_MAX_PROMPT and prompt_len + output_len <= SHAREGPT_MAX_TOTAL:
            samples.append(Sample(turns[0], prompt_len, output_len))
    return samples


def _custom(args: argparse.Namespace, entries: Sequence[Any]) -> list[Sample]:
    """Lines with `prompt` (a text or token ids) or `messages`, and `output_tokens` if the lengths are theirs."""
    samples: list[Sample] = []
    for number, entry in enumerate(entries[: args.num_prompts], start=1):
        prompt = (entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None) or None
        if not isinstance(prompt, str | list):
            message = f"line {number} of {args.dataset_path!r} has neither `prompt` nor `messages`."
            raise ConfigError.of("dataset_path", message)
        output_len = args.output_len or args.custom_output_len
        if output_len < 1:
            output_len = entry.get("output_tokens")
            if not isinstance(output_len, int) or output_len < 1:
                message = f"-1 takes `output_tokens` of each line; line {number} has {output_len!r}."
                raise ConfigError.of("custom_output_len", message)
        sample = Sample(prompt, None, output_len)
        samples.append(dataclasses.replace(sample, prompt_len=len(prompt)) if sample.kind == "ids" else sample)
    return samples
