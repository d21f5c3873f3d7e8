"""`vllm.benchmarks.datasets`: the prompts that scripts of vLLM measure with, from the data sets of `quire bench`."""

import argparse
import dataclasses
from typing import Any

from quire.benchmarks import datasets
from quire.engine.arg_parser import add_flags

__all__ = ["SampleRequest", "add_dataset_parser", "get_samples"]

_OURS = ("--input-len", "--output-len")
"""Flags that vLLM's data sets do not have, and scripts may have of their own."""


@dataclasses.dataclass
class SampleRequest:
    """A prompt: its text, its tokens, and most tokens of its answer."""

    prompt: Any
    prompt_len: int | None
    expected_output_len: int
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags of data sets to a script's own."""
    groups = datasets.flags(num_prompts=1000, input_len=1024, output_len=128)
    groups["Requests"] = [row for row in groups["Requests"] if row[0] not in _OURS]
    add_flags(parser, groups)
    parser.set_defaults(input_len=None, output_len=None)
    parser.add_argument("--seed", type=int, default=0, help="of random prompts")
    parser.add_argument("--enable-multimodal-chat", action="store_true", help=argparse.SUPPRESS)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """The prompts that the flags ask for; random tokens become a text. `tokenizer` is Transformers'."""
    samples = datasets.load_samples(args, args.seed, len(tokenizer), lambda text: len(tokenizer.encode(text)))
    texts = (tokenizer.decode(each.prompt) if each.kind == "ids" else each.prompt for each in samples)
    return [SampleRequest(text, each.prompt_len, each.output_len) for text, each in zip(texts, samples, strict=True)]
