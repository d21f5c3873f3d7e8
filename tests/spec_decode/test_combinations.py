"""Speculation with adapters and over ranks: the tokens of an engine without it. Who cannot have it is told why."""

from pathlib import Path
from typing import Any

import pytest
from tests.lora.conftest import PROMPTS, request
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.engine import arg_utils
from quire.errors import ConfigError
from quire.executor import selector

ALWAYS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "enable_adaptive_verification": False}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def tokens_of(base: Path, adapters: list[Path | None], **settings: Any) -> tuple[list[list[int]], Any]:
    llm = LLM(
        str(base), dtype="float32", max_model_len=128, max_num_seqs=16, skip_tokenizer_init=True, block_size=16,
        kv_cache_memory_bytes=1 << 24, **settings,
    )  # fmt: skip
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    requests = [None if adapter is None else request(adapter, 1 + adapters.index(adapter)) for _, adapter in pairs]
    params = [
        SamplingParams(temperature=0.5 * (n % 2), seed=n, max_tokens=48, ignore_eos=True) for n in range(len(pairs))
    ]
    given = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
    extra = {"lora_request": requests} if any(requests) else {}
    outputs = llm.generate(given, params, use_tqdm=False, **extra)
    return [list(output.outputs[0].token_ids) for output in outputs], llm.call("stats")


@pytest.mark.parametrize("runner", ["host", "device"])
def test_a_batch_that_mixes_adapters(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path, runner: str, kept_selection: None
) -> None:
    if runner == "device":
        for module in (selector, arg_utils):
            monkeypatch.setattr(module, "current_platform", lambda _name: AsyncCpuPlatform())
    ends = make_adapter(llama, tmp_path / "ends", 2, r=20, target_modules=["embed_tokens", "lm_head", "q_proj"])
    every = make_adapter(llama, tmp_path / "all", 1, r=8, lora_alpha=16, target_modules="all-linear")
    expected, _ = tokens_of(llama, [None, ends, every], enable_lora=True)
    tokens, stats = tokens_of(llama, [None, ends, every], enable_lora=True, speculative_config=ALWAYS)
    assert tokens == expected
    assert 0 < sum(stats.accepted_per_position) < stats.num_draft_tokens


def test_two_ranks_accept_the_same_guesses(llama: Path) -> None:
    expected, _ = tokens_of(llama, [None])
    tokens, stats = tokens_of(llama, [None], tensor_parallel_size=2, speculative_config=ALWAYS)
    assert tokens == expected
    assert 0 < sum(stats.accepted_per_position) < stats.num_draft_tokens


def test_a_model_that_pools_is_refused_and_auto_is_off(llama: Path) -> None:
    with pytest.raises(ConfigError, match="a pooling model gives no tokens") as error:
        LLM(str(llama), runner="pooling", speculative_config=ALWAYS)
    assert error.value.setting == "speculative_config"
    assert LLM(str(llama), runner="pooling", skip_tokenizer_init=True, speculative_config="auto").llm_engine is not None
