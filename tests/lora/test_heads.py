"""Adapters with a head of their own: a fine-tuned classifier's matrices, whole or with an update, each for its own requests."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.peft_adapters import randomize
from tests.oracles.tiny_models import make_tiny_model
from tests.oracles.tiny_poolers import load_pooling_oracle, logits

from quire import LLM, LoRARequest, PoolingParams
from quire.engine import arg_utils
from quire.errors import QuireError
from quire.executor import selector

SETTINGS: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 4}
PROMPTS = [[5, 6, 7, 8], [9] * 20, [11, 12, 13]]
RAW = PoolingParams(use_activation=False)


def adapted(base: Path, architecture: str, path: Path, seed: int, **config: Any) -> Path:
    """An adapter of random numbers, as PEFT saves that of a classifier."""
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS", **config}
    model = peft.get_peft_model(load_pooling_oracle(base, architecture), peft.LoraConfig(**config))
    randomize(model, seed, 0.5)
    model.save_pretrained(str(path))
    return path


def expected(base: Path, architecture: str, path: Path | None, prompt: list[int]) -> np.ndarray:
    model = load_pooling_oracle(base, architecture)
    if path is not None:
        model = peft.PeftModel.from_pretrained(model, str(path)).eval()
    return logits(model, prompt).numpy()


def assert_parity(base: Path, architecture: str, paths: list[Path], **settings: Any) -> None:
    """Each prompt with each adapter and with none, all in the same batches."""
    requests = [None, *(LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1))]
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in requests]
    with LLM(str(base), enable_lora=True, **(SETTINGS | settings)) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        adapters = [adapter for _, adapter in asked]
        outputs = llm.encode(prompts, RAW, lora_request=adapters, use_tqdm=False)
    for (prompt, adapter), output in zip(asked, outputs, strict=True):
        path = None if adapter is None else Path(adapter.lora_path)
        np.testing.assert_allclose(output.outputs.data, expected(base, architecture, path, prompt), atol=2e-4)


@pytest.mark.parametrize("is_beside", [False, True])
def test_scores_are_those_of_each_prompts_own_head(tmp_path: Path, is_beside: bool, monkeypatch: pytest.MonkeyPatch):
    """Also on a device that works beside the host, and where adapters take turns in one place."""
    if is_beside:
        platform = AsyncCpuPlatform()
        for module in (selector, arg_utils):
            monkeypatch.setattr(module, "current_platform", lambda _name: platform)
    name = "Qwen3ForSequenceClassification"
    base = make_tiny_model(name, tmp_path / "base", num_labels=3)
    one = adapted(base, name, tmp_path / "one", 1)
    two = adapted(base, name, tmp_path / "two", 2, r=2, use_dora=True)
    alone = adapted(base, name, tmp_path / "alone", 3, target_modules=["score"], task_type=None)
    assert_parity(base, name, [one, two, alone], max_loras=1 + is_beside)


def test_a_head_of_two_matrices_with_biases(tmp_path: Path):
    name = "RobertaForSequenceClassification"
    base = make_tiny_model(name, tmp_path / "base", num_labels=2)
    one = adapted(base, name, tmp_path / "one", 1, target_modules=["query", "value"])
    assert_parity(base, name, [one])


def test_numbers_of_tokens(tmp_path: Path):
    name = "Qwen3ForTokenClassification"
    base = make_tiny_model(name, tmp_path / "base", num_labels=4)
    one = adapted(base, name, tmp_path / "one", 1, task_type="TOKEN_CLS")
    assert_parity(base, name, [one], max_num_batched_tokens=8)


def test_a_head_of_another_size_is_refused_and_harms_no_other(tmp_path: Path):
    name = "Qwen3ForSequenceClassification"
    base = make_tiny_model(name, tmp_path / "base", num_labels=3)
    other = make_tiny_model(name, tmp_path / "other", num_labels=5)
    wrong = adapted(other, name, tmp_path / "wrong", 1)
    with LLM(str(base), enable_lora=True, **SETTINGS) as llm:
        prompt = {"prompt_token_ids": PROMPTS[0]}
        with pytest.raises(QuireError, match=r"head: score is \[3, 64\] in the model, and \[5, 64\]"):
            llm.encode(prompt, RAW, lora_request=LoRARequest("wrong", 1, str(wrong)), use_tqdm=False)
        (output,) = llm.encode(prompt, RAW, use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data, expected(base, name, None, PROMPTS[0]), atol=2e-4)
    assert torch.isfinite(torch.as_tensor(output.outputs.data)).all()
