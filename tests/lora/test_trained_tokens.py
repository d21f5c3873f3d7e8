"""Rows of some tokens in the embedding and in the head are an adapter's, within LoRA or alone, and adapters whose base had fewer
tokens; the oracle is PEFT."""

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.lora.conftest import PROMPTS, TOLERANCE, assert_parity, request, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter, randomize
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model

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


@pytest.mark.parametrize("is_tied", [False, True])
def test_trained_tokens_may_be_all_of_an_adapter(is_tied: bool, tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=is_tied)
    paths = [tmp_path / "embedding", *(() if is_tied else (tmp_path / "both",))]
    for seed, path in enumerate(paths):
        targets = ["embed_tokens", "lm_head"] if path.name == "both" else None
        config = peft.TrainableTokensConfig(token_indices=[7, 3, 200], target_modules=targets)
        model = peft.get_peft_model(load_oracle(base), config)
        randomize(model, seed, 0.3)
        model.save_pretrained(str(path))
    assert_parity(LLM(str(base), **SETTINGS), base, [None, *paths], PROMPTS[:2], max_tokens=3)


CUT = 370
"""Tokens of a base that had fewer than the model: all of the prompts' are among them."""
OF_CUT: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "untrained": {},  # PEFT saves both matrices of a base that was resized
    "low rank": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [3, 200]},
}


def cut_oracle(base: Path) -> Any:
    oracle = load_oracle(base)
    oracle.resize_token_embeddings(CUT)
    return oracle


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_adapter_whose_base_had_fewer_tokens_gives_these_and_no_others(is_tied: bool, tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", tie_word_embeddings=is_tied)
    paths = [tmp_path / name for name in OF_CUT if not (is_tied and name == "low rank")]
    for seed, path in enumerate(paths):
        config = peft.LoraConfig(**{"r": 3, "target_modules": ["q_proj"], **OF_CUT[path.name]})
        model = peft.get_peft_model(cut_oracle(base), config)
        randomize(model, seed, 0.3)
        model.save_pretrained(str(path))
    requests = [None, *(request(path, number) for number, path in enumerate(paths, 1))]
    outputs = run(LLM(str(base), **SETTINGS), [PROMPTS[0]] * len(requests), requests, max_tokens=3)
    assert worst_difference(outputs[0], PeftOracle(base)) < TOLERANCE
    for path, output in zip(paths, outputs[1:], strict=True):
        oracle = peft.PeftModel.from_pretrained(cut_oracle(base), str(path)).eval()
        completion = output.outputs[0]
        assert completion.logprobs is not None
        tokens = [*PROMPTS[0], *completion.token_ids]
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens])).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
        for position, row in zip(completion.logprobs, expected, strict=True):
            ours = {token: entry.logprob for token, entry in position.items()}
            assert max(abs(ours[token] - float(row[token])) for token in range(CUT)) < TOLERANCE, path.name
            assert all(ours.get(token, -math.inf) < -1e4 for token in range(CUT, VOCAB_SIZE)), path.name


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
