"""The last layer may leave out tokens that need no logits: those that do get the same ones, and all are kept in pages."""

import copy

import pytest
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny

from quire.kernels import ops
from quire.layers.decoder import Decoder
from quire.layers.interface import StepInputs

MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "norms of heads": ("Qwen3ForCausalLM", {}),
    "windows, four norms": ("Gemma3ForCausalLM", {}),
    "layer norms, positions": ("GPT2LMHeadModel", {}),
    "scaled residual": ("GraniteForCausalLM", {}),
    "norms behind": ("Olmo2ForCausalLM", {}),
    "experts": ("Qwen3MoeForCausalLM", {}),
    "parallel halves: computes every token": ("PhiForCausalLM", {}),
}
PROMPTS = ([5, 99, 301, 17, 5, 44, 200], [81, 9], [150, 33, 7, 8, 9, 10, 61, 3, 4], [12])


def sampled_inputs(inputs: StepInputs, sequences: list[Sequence], indices: list[int]) -> StepInputs:
    """The tokens at these indices as requests of one token."""
    count = len(indices)
    sampled = copy.copy(inputs)
    counts = (count, count, 1, max((sequence.computed for sequence in sequences), default=0))
    sampled.num_tokens = sampled.num_logits = count
    sampled.attention = []
    for group in inputs.attention:
        described = copy.copy(group)
        described.query_start = torch.arange(count + 1, dtype=torch.int32)
        described.seq_lens = torch.tensor([sequence.computed for sequence in sequences], dtype=torch.int32)
        described.rows = torch.tensor([sequence.row for sequence in sequences], dtype=torch.int32)
        described.shape = torch.tensor(counts)
        described.num_tokens, described.num_requests, described.max_query_len, described.max_seq_len = counts
        sampled.attention.append(described)
    return sampled


def run_step(model: Decoder, driver: ModelDriver, chosen: list[int], counts: list[int]) -> torch.Tensor:
    """A step of every prompt's next tokens; logits of the last token of the chosen ones alone."""
    sequences = driver.sequences  # type: ignore[attr-defined]
    inputs = driver.step_inputs
    inputs.sampled = None
    driver.step(list(zip(sequences, counts, strict=True)))
    ends = torch.tensor(counts).cumsum(0) - 1
    indices = [int(ends[index]) for index in chosen]
    inputs.logits_index[: len(indices)] = torch.tensor(indices, dtype=torch.int32)
    inputs.num_logits = len(indices)
    whole = model.compute_logits(inputs).clone()
    inputs.sampled = sampled_inputs(inputs, [sequences[index] for index in chosen], indices)
    hidden = model.forward(inputs)
    if not model.spec.placement.parallel:
        assert len(hidden) == len(indices), "every token came through the last layer"
    if indices:
        torch.testing.assert_close(model.compute_logits(inputs), whole, atol=1e-4, rtol=1e-4)
    return whole


def check(model: Decoder) -> None:
    driver = ModelDriver(model)
    driver.sequences = [Sequence(list(tokens) + [3] * 20, row=row) for row, tokens in enumerate(PROMPTS)]
    run_step(model, driver, [0, 2], [len(tokens) for tokens in PROMPTS])
    run_step(model, driver, [], [2, 1, 3, 1])
    run_step(model, driver, [0, 1, 2, 3], [1, 4, 1, 1])


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_that_need_logits_get_the_same_ones(name, kernels, tiny):
    architecture, overrides = MODELS[name]
    check(build_tiny(tiny(architecture, **overrides)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_products_with_norms_and_sums_do_the_same(architecture, reference_kernels, tiny, monkeypatch):
    monkeypatch.setattr(ops, "is_native", lambda op: True)
    model = build_tiny(tiny(architecture))
    assert model._operations.is_fused
    check(model)
