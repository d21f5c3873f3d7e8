"""Models over several processes that sum through gloo: logprobs and tokens as on one rank, the same bits on every rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed import one_rank
from tests.distributed.ranks import ranks_of
from tests.models.test_parity import SHAPES
from tests.models.test_parity_dense import SHAPES as DENSE
from tests.oracles.tiny_models import make_tiny_model

TOLERANCE = 1e-4

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama: tied, one KV head for all ranks, a vocabulary that does not divide": (
        "LlamaForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 387},
    ),
    "llama: biases, a head that does not divide": (
        "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "vocab_size": 387},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gemma3: two groups of pages": ("Gemma3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 9}),
    "granite": ("GraniteForCausalLM", {}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {}),
    "qwen2 moe: a gated shared expert": ("Qwen2MoeForCausalLM", {}),
    "phi: both halves on one residual, a head with a bias": ("PhiForCausalLM", {}),
    "diffllama: one pair of KV heads for all ranks": (
        "DiffLlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    **{
        name: DENSE[name]
        for name in (
            "olmo2", "olmo3", "stablelm: parallel, norms of heads, biases", "cohere: norms of heads, untied", "bloom: 6 heads",
            "mpt", "falcon: 7b", "falcon: 40b", "gpt-neox", "gpt-j", "gpt-bigcode",
            "gpt-1", "gpt-neo", "gpt-neox japanese", "codegen", "apertus", "hunyuan dense",
            "glm4", "nemotron", "opt: 350m", "ministral", "ministral3", "smollm3", "granite swa", "olmo: clipped",
        )
    },
}  # fmt: skip


def check(
    size: int,
    folder: Path,
    models: dict[str, tuple[str, dict[str, Any]]],
    kernels: str,
    tolerance: float = TOLERANCE,
    experts: str = "split",
) -> None:
    paths = {
        name: make_tiny_model(architecture, folder / f"model{number}", tokenizer=False, **overrides)
        for number, (name, (architecture, overrides)) in enumerate(models.items())
    }
    ranks = ranks_of(size).run(folder, paths, kernels, experts)
    one_rank.select_kernels(kernels)
    for name, path in paths.items():
        logprobs, tokens = one_rank.compute(path, None)
        assert ranks[0][f"{name}/tokens"].tolist() == tokens, name
        np.testing.assert_allclose(ranks[0][f"{name}/logprobs"], logprobs, rtol=0, atol=tolerance, err_msg=name)
        for rank in ranks[1:]:
            assert np.array_equal(rank[f"{name}/logprobs"], ranks[0][f"{name}/logprobs"]), name


@pytest.fixture(autouse=True)
def restored_choice(kept_selection: None) -> None:
    """Which kernels are chosen is the process's state: other rooms' tests get back what they had."""


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    check(2, tmp_path, MODELS, "native")


def test_fused_layers_over_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    fused = {name: shape for name, shape in MODELS.items() if name.startswith(("llama", "qwen", "mistral"))}
    check(2, tmp_path, fused, "fused")


def divides(architecture: str, overrides: dict[str, Any], size: int) -> bool:
    """Whether a shape's heads and widths can be shared evenly."""
    heads = next((overrides[key] for key in ("n_head", "n_heads", "num_attention_heads") if key in overrides), 4)
    if architecture == "DiffLlamaForCausalLM":
        heads //= 2  # pairs of them are shared
    kv_heads = overrides.get("num_key_value_heads", 2)
    widths = [overrides[key] for key in ("n_inner", "intermediate_size") if overrides.get(key)]
    fits = kv_heads % size == 0 or size % kv_heads == 0
    return heads % size == 0 and fits and all(width % size == 0 for width in widths)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["native", "reference", "fused"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("third", range(3))
def test_every_architecture_over_two_and_four_ranks(third: int, size: int, kernels: str, tmp_path: Path) -> None:
    models = [(name, shape) for name, shape in (SHAPES | DENSE | MODELS).items() if divides(*shape, size)]
    assert len(models) > 75
    check(size, tmp_path, dict(models[third::3]), kernels)
