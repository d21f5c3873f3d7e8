"""`trainable_token_indices`: rows of some tokens in the embedding and in the head are an adapter's; the oracle is PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lora.conftest import PROMPTS, assert_parity, request
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.errors import RequestError

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 16, "max_logprobs": -1}
OF_BOTH = {"embed_tokens": [3, 7, 200], "lm_head": [5, 11]}


@pytest.mark.parametrize(
    ("architecture", "is_tied", "tokens"),
    [
        ("LlamaForCausalLM", False, OF_BOTH),
        ("LlamaForCausalLM", True, [7, 3, 90]),  # the head's rows too
        ("Gemma3ForCausalLM", True, [3, 4]),  # whose embeddings are multiplied
    ],
)
def test_rows_of_tokens_take_the_place_of_the_bases(architecture: str, is_tied: bool, tokens: Any, tmp_path: Path):
    base = make_tiny_model(architecture, tmp_path / "base", tie_word_embeddings=is_tied)
    trained = make_adapter(
        base, tmp_path / "trained", 1, r=3, target_modules=["q_proj"], trainable_token_indices=tokens
    )
    plain = make_adapter(base, tmp_path / "plain", 2, r=4, target_modules=["v_proj", "embed_tokens"])
    llm = LLM(str(base), max_lora_rank=4, **SETTINGS)
    assert_parity(llm, base, [None, trained, plain], PROMPTS[:2], max_tokens=3)
    assert_parity(llm, base, [trained], PROMPTS[:1], max_tokens=2)  # once more, from where it was kept


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    trained = make_adapter(base, tmp_path / "t", 1, r=3, target_modules=["q_proj"], trainable_token_indices=[3, 7])
    llm, file = LLM(str(base), **SETTINGS), trained / "adapter_config.json"
    config = json.loads(file.read_text())
    for tokens, message in (
        ([3, 4000], "trained token 4000"),
        ([3], "rows for 2 tokens, and trainable_token_indices 1"),
    ):
        file.write_text(json.dumps({**config, "trainable_token_indices": tokens}))
        with pytest.raises(RequestError, match=message):
            llm.add_lora(request(trained))
