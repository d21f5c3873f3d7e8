"""Puts code of your own between the model and the sampler: python examples/logits_processor.py [MODEL]

A processor of the engine serves many requests at once; a server takes it as --logits-processors MODULE:NoDigits, and a request
turns it on with "vllm_xargs": {"no_digits": true}. A processor of one request is a plain function, for offline use.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.sample.logits_processor import LogitsProcessor
from quire.tokenizers.loader import get_tokenizer


class NoDigits(LogitsProcessor):
    """Forbids tokens with digits for requests with the extra argument `no_digits`."""

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        tokenizer = get_tokenizer(config.model.tokenizer_path)
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        has_digit = [any(map(str.isdigit, text)) for text in texts]
        self.digit_tokens = torch.tensor(np.flatnonzero(has_digit), device=device)

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        return bool((params.extra_args or {}).get("no_digits"))

    def remove_row(self, row: int) -> None:
        pass  # nothing is kept by row

    def apply(self, logits_NV: torch.Tensor, rows_N: np.ndarray) -> torch.Tensor:
        logits_NV[:, self.digit_tokens] = float("-inf")
        return logits_NV


def end_after(count: int, end_token: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A processor of one request: after `count` tokens the end of the sequence has the highest logit."""

    def process(output_token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) >= count:
            logits_V[end_token] = logits_V.max() + 1
        return logits_V

    return process


def main(model: str | None = None) -> None:
    """Prints an answer without a processor, one with each kind of it."""
    llm = LLM(model, max_model_len=1024, logits_processors=[NoDigits])
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    plain = SamplingParams(temperature=0, max_tokens=16)
    without_digits = SamplingParams(temperature=0, max_tokens=16, extra_args={"no_digits": True})
    processor = end_after(3, llm.get_tokenizer().eos_token_id)
    short = SamplingParams(temperature=0, max_tokens=16, logits_processors=[processor])
    for name, params in (("plain", plain), ("no digits", without_digits), ("three tokens", short)):
        output = llm.chat(question, params)[0].outputs[0]
        print(f"{name}: {output.text.strip()!r} ({len(output.token_ids)} tokens)")


if __name__ == "__main__":
    main(*sys.argv[1:2])
