"""An engine over a tiny model, and the comparison of its logprobs with PEFT's."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tests.oracles.peft_adapters import PeftOracle

from quire import LLM, SamplingParams
from quire.adapters import LoRARequest
from quire.outputs import RequestOutput

TOLERANCE = 5e-4
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [200, 17, 90, 33], [7] * 21)


def request(path: Path, number: int = 1) -> LoRARequest:
    """An adapter, by its folder."""
    return LoRARequest(path.name, number, str(path))


def run(
    llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest | None], max_tokens: int = 6
) -> list[RequestOutput]:
    """Some tokens for each prompt, drawn at random but by seed, with every token's logprob."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=-1)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=list(adapters))
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def worst_difference(output: RequestOutput, oracle: PeftOracle) -> float:
    """How far the logprobs of an output's tokens are from the oracle's."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    expected = oracle.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    worst = 0.0
    for position, row in zip(completion.logprobs, expected, strict=True):
        ours = torch.full_like(row, -torch.inf)
        for token_id, entry in position.items():
            ours[token_id] = entry.logprob
        worst = max(worst, float((ours - row).abs().max()))
    return worst


def assert_parity(
    llm: LLM,
    base: Path,
    adapters: Sequence[Path | None],
    prompts: Sequence[list[int]] = PROMPTS,
    max_tokens: int = 6,
) -> None:
    """One batch, in which every prompt comes with every adapter, equals the oracle's logprobs, prompt by prompt."""
    pairs = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    numbers = {adapter: number for number, adapter in enumerate(adapters, 1)}
    requests = [None if adapter is None else request(adapter, numbers[adapter]) for _, adapter in pairs]
    outputs = run(llm, [prompt for prompt, _ in pairs], requests, max_tokens)
    for adapter in adapters:
        oracle = PeftOracle(base, adapter)
        for output, (_, its) in zip(outputs, pairs, strict=True):
            if its is adapter:
                assert worst_difference(output, oracle) < TOLERANCE, f"{adapter}, {output.prompt_token_ids}"
