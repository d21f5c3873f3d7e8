"""Models with images or sounds in their prompts, in the whole engine, beside Transformers: what is asked, with which settings,
and how answers are compared.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams

COMMON: dict[str, Any] = {"max_num_batched_tokens": 128, "max_model_len": 256, "num_gpu_blocks_override": 200}
CHUNKS, FEW_PAGES = "chunks that end within items", "few pages, so that requests are preempted"
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 8},
    CHUNKS: {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    FEW_PAGES: {"max_num_seqs": 8, "max_model_len": 200, "num_gpu_blocks_override": 24},
    "no prefix cache, eager": {"enable_prefix_caching": False, "max_num_seqs": 3, "enforce_eager": True},
}
Prompt = tuple[list[int], list[str]]
"""Token ids with a marker for each item, and the items' names."""


class MediaOracle(Protocol):
    """Transformers."""

    def logprobs(self, token_ids: Sequence[int], items: Sequence[Any], num_prompt: int = 0) -> torch.Tensor:
        """Of each position of an expanded prompt and its answer: [tokens, V]. `num_prompt`: tokens of the prompt."""
        ...


def draw_prompts(marker: int, shared: str, three: list[str], twice: str, other: str) -> list[Prompt]:
    """Prompts with no item, one and three of several sizes, some of them shared."""
    return [
        ([5, 6, 7, 8], []),
        ([5, marker, 9, 10], [shared]),
        ([marker, 14, marker, 8, marker, 12, 13], three),
        ([5, marker, 9, 11, 17], [shared]),
        ([21, 22, marker, 23, marker, 24], [twice, twice]),
        ([5, marker, 9, 10], [other]),
        ([31 + number for number in range(40)], []),
    ]


def ask(
    llm: LLM, modality: str, marker: int, asked: Sequence[tuple[list[int], list[Any]]], max_tokens: int
) -> list[RequestOutput]:
    """The engine's answers to token ids with their items, all at once."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        allowed_token_ids=list(range(marker)),
    )
    requests: list[Any] = [{"prompt_token_ids": ids, "multi_modal_data": {modality: items}} for ids, items in asked]
    return llm.generate(requests, params, use_tqdm=False)


def expected_logprobs(oracle: MediaOracle, items: Sequence[Any], output: RequestOutput) -> torch.Tensor:
    """Transformers' logprobs at each place of an answer: [tokens, V]."""
    prompt = list(output.prompt_token_ids or ())
    return oracle.logprobs([*prompt, *output.outputs[0].token_ids], items, len(prompt))[len(prompt) - 1 : -1]


def largest_difference(expected: torch.Tensor, output: RequestOutput) -> float:
    """Of the logprobs of an answer's tokens, of which there is one at least."""
    completion = output.outputs[0]
    assert completion.token_ids, output
    pairs = zip(expected, completion.token_ids, completion.logprobs or (), strict=True)
    return max(abs(float(row[token]) - own[token].logprob) for row, token, own in pairs)


def assert_parity(oracle: MediaOracle, marker: int, items: Sequence[Any], output: RequestOutput) -> None:
    """The answer is Transformers', token by token, and so are its logprobs."""
    expected = expected_logprobs(oracle, items, output)
    assert list(output.outputs[0].token_ids) == expected[:, :marker].argmax(-1).tolist()
    assert largest_difference(expected, output) == pytest.approx(0.0, abs=1e-3)
