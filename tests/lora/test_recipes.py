"""Adapters of one structure are read by one recipe, which is found out from the second one; the oracle is PEFT."""

from pathlib import Path
from typing import Any

import pytest
from tests.lora.conftest import PROMPTS, assert_parity, request
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM

SETTINGS: dict[str, Any] = {"enable_lora": True, "max_model_len": 64, "max_num_seqs": 16, "max_logprobs": -1}
EVERYTHING = {
    "r": 4,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"],
    "rank_pattern": {"v_proj": 2},
    "use_rslora": True,
}


def num_followed(llm: LLM) -> int:
    return llm.collective_rpc("explain")[0]["adapters"]["loads_by_recipe"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_third_of_a_structure_is_read_as_the_second_was(dtype: str, tmp_path: Path):
    base = make_tiny_model("Qwen2ForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    # Small numbers: logprobs of 70 differ by more than the tolerance between two processors.
    adapters = [make_adapter(base, tmp_path / str(seed), seed, scale=0.1, **EVERYTHING) for seed in range(5)]
    llm = LLM(str(base), dtype=dtype, **SETTINGS)
    if dtype == "float32":
        assert_parity(llm, base, [None, *adapters], PROMPTS[:1], max_tokens=3)
    else:
        for number, path in enumerate(adapters, 1):
            llm.add_lora(request(path, number))
    assert num_followed(llm) == 3


def test_other_structures_are_read_matrix_by_matrix(tmp_path: Path):
    base = make_tiny_model("Qwen2ForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    kinds: list[dict[str, Any]] = [{"lora_alpha": 4}, {"lora_alpha": 8}, {"use_dora": True}, {"bias": "lora_only"}]
    common = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    llm = LLM(str(base), dtype="float32", **SETTINGS)
    alike = [make_adapter(base, tmp_path / f"{at}", at, **common, **kind) for at, kind in enumerate(kinds)]
    assert_parity(llm, base, alike, PROMPTS[:1], max_tokens=2)
    for kind in kinds[2:]:  # whose numbers depend on the base, too
        more = [make_adapter(base, tmp_path / f"{kind}{at}", at, **common, **kind) for at in range(7, 10)]
        assert_parity(llm, base, more, PROMPTS[:1], max_tokens=2)
    assert num_followed(llm) == 0
