"""Every architecture against Transformers in float32: the same greedy tokens, and logprobs within 1e-3, however a step is cut."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle

PROMPT_LENGTHS = (1, 5, 17, 40, 70)
NEW_TOKENS = 6
TOLERANCE = 1e-3

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama: multi-head, tied": ("LlamaForCausalLM", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama: biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama: 6 heads of 20 over hidden 72, one KV head": (
        "LlamaForCausalLM",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "hidden_size": 72,
            "intermediate_size": 100,
        },
    ),
    "llama: heads of 64 that are wider than hidden": ("LlamaForCausalLM", {"head_dim": 64}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral: window shorter than the prompt": ("MistralForCausalLM", {"sliding_window": 9}),
    "mistral: window of one page": ("MistralForCausalLM", {"sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2: windows from layer 1 on, tied": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3: biases, tied": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3 moe: two of three layers dense, weights not renormalised": (
        "Qwen3MoeForCausalLM",
        {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3 moe: a dense layer by name, every expert chosen, biases": (
        "Qwen3MoeForCausalLM",
        {"mlp_only_layers": [1], "num_experts_per_tok": 8, "attention_bias": True},
    ),
    "qwen2 moe: a gated shared expert": ("Qwen2MoeForCausalLM", {}),
    "qwen2 moe: no biases, renormalised, dense first layer": (
        "Qwen2MoeForCausalLM",
        {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "mixtral": ("MixtralForCausalLM", {}),
    "mixtral: window shorter than the prompt": ("MixtralForCausalLM", {"sliding_window": 9}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt2: 3 heads of 20, own inner size": ("GPT2LMHeadModel", {"n_embd": 60, "n_head": 3, "n_inner": 100}),
    "gpt2: scores scaled by layer": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2: untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3: window, partial rotation": ("Phi3ForCausalLM", {"sliding_window": 12, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "starcoder2: no biases, window": ("Starcoder2ForCausalLM", {"use_bias": False, "sliding_window": 10}),
    "opt": ("OPTForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "exaone4: no windows": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
}

REQUIRED = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@functools.cache
def oracle_logprobs(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return _oracle(path)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


@functools.lru_cache(maxsize=2)
def _oracle(path: Path) -> Any:
    return load_oracle(path)


def prompts(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def run_mixed(driver: ModelDriver, seed: int) -> list[tuple[list[int], torch.Tensor]]:
    """All prompts at once, in random chunks of at most 16 tokens, decoding as soon as a prompt is done; in each step a random
    part of the requests, in random order. Returns each request's tokens and the logprobs at every position."""
    draw = random.Random(seed)
    sequences = [Sequence(ids, row) for row, ids in enumerate(prompts(seed))]
    logprobs: list[list[torch.Tensor]] = [[] for _ in sequences]
    goal = [length + NEW_TOKENS for length in PROMPT_LENGTHS]
    while unfinished := [s for s in sequences if len(s.token_ids) < goal[s.row]]:
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        work = [(s, min(draw.randint(1, 16), len(s.token_ids) - s.computed)) for s in chosen]
        for (sequence, _), rows in zip(work, driver.step(work), strict=True):
            logprobs[sequence.row].append(rows)
            if sequence.computed == len(sequence.token_ids):
                sequence.token_ids.append(int(rows[-1].argmax()))
    return [(s.token_ids, torch.cat(logprobs[s.row])) for s in sequences]


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    driver = ModelDriver(build_tiny(path))
    for token_ids, logprobs in run_mixed(driver, seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_any_page_size_gives_the_same(name, block_size, kernels, tiny):
    architecture, overrides = SHAPES[name]
    path = tiny(architecture, **overrides)
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", REQUIRED)
def test_half_precision_stays_close_to_float32(name, dtype, kernels, tiny):
    """Weights and pages in 16 bits; the oracle has the same (rounded) weights and computes in float32."""
    architecture, _ = SHAPES[name]
    path = tiny(architecture, dtype=dtype)
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(path, dtype=dtype)).prefill(Sequence(token_ids, row=0), chunk=16)
    expected = oracle_logprobs(path, tuple(token_ids))
    error = (logprobs - expected).abs()
    worst, mean = (0.5, 0.05) if dtype == "bfloat16" else (0.07, 0.006)
    assert error.max() < worst
    assert error.mean() < mean


def test_the_comparison_sees_one_misplaced_token(reference_kernels, tiny):
    path = tiny("LlamaForCausalLM")
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path))
    swapped = [*token_ids[:10], token_ids[11], token_ids[10], *token_ids[12:]]
    logprobs = driver.prefill(Sequence(swapped, row=0))
    error = (logprobs - oracle_logprobs(path, tuple(token_ids))).abs().amax(-1)
    assert error[:10].max() < TOLERANCE
    assert error[12:].min() > 10 * TOLERANCE


def test_a_prefix_that_another_request_computed_may_be_shared(kernels, tiny):
    """Two rows whose tables name the same first pages: the second computes only its own rest."""
    path = tiny("LlamaForCausalLM")
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0))
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)
