"""Adapters on a device that works beside the host: two steps in flight, graphs, groups of rows, Triton's kernels."""

from pathlib import Path
from typing import Any

import pytest
from tests.lora.conftest import TOLERANCE, assert_parity, request, run
from tests.oracles.async_platform import AsyncCpuPlatform
from tests.oracles.interpreter import repair_interpreter
from tests.oracles.peft_adapters import PeftOracle, make_adapter, make_virtual
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.engine import arg_utils
from quire.executor import selector
from quire.kernels import registry


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path / "base")


class TritonAdapters(AsyncCpuPlatform):
    """Triton's kernels for what adapters add, in the interpreter, and references for the rest."""

    def select_kernels(self, *, deterministic: bool = False) -> None:
        from quire.kernels import triton

        repair_interpreter()
        triton.register()
        choices = {op: registry.choose(op, "reference", deterministic=deterministic) for op in registry.operations()}
        ours = ("adapter_shrink", "adapter_expand", "adapter_lookup")
        registry.use(choices | {op: registry.choose(op, "cuda", deterministic=deterministic) for op in ours})


def make_llm(
    monkeypatch: pytest.MonkeyPatch, base: Path, kind: type[AsyncCpuPlatform] = AsyncCpuPlatform
) -> tuple[LLM, AsyncCpuPlatform]:
    platform = kind()
    for module in (selector, arg_utils):
        monkeypatch.setattr(module, "current_platform", lambda _name: platform)
    settings = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "max_logprobs": -1, "block_size": 16}
    return LLM(str(base), enable_lora=True, kv_cache_memory_bytes=1 << 24, **settings), platform


def test_a_batch_that_mixes_adapters_equals_peft(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    first = make_adapter(llama, tmp_path / "all", 1, r=8, lora_alpha=16, target_modules="all-linear")
    second = make_adapter(llama, tmp_path / "ends", 2, r=20, target_modules=["embed_tokens", "lm_head", "q_proj"])
    llm, _ = make_llm(monkeypatch, llama)
    assert_parity(llm, llama, [None, first, second])


@pytest.mark.parametrize("kind", [AsyncCpuPlatform, TritonAdapters])
def test_virtual_tokens_equal_peft(
    kind: type[AsyncCpuPlatform], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    keys = make_virtual(llama, tmp_path / "keys", "PREFIX_TUNING", 1, tokens=3)
    prompt = make_virtual(llama, tmp_path / "prompt", "PROMPT_TUNING", 2, tokens=2)
    llm, _ = make_llm(monkeypatch, llama, kind)
    assert_parity(llm, llama, [keys, prompt, None], prompts=[[3, 4, 5]], max_tokens=2)


def test_tritons_kernels_give_what_peft_gives(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    first = make_adapter(llama, tmp_path / "all", 1, r=20, target_modules=["embed_tokens", "lm_head", "q_proj"])
    second = make_adapter(llama, tmp_path / "qv", 2, r=4, target_modules=["v_proj", "down_proj"])
    llm, _ = make_llm(monkeypatch, llama, TritonAdapters)
    assert_parity(llm, llama, [first, second], prompts=[[3, 4, 5]], max_tokens=2)


def test_steps_without_adapters_replay_the_graphs_of_the_base(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    adapter = request(make_adapter(llama, tmp_path / "a", 1, r=8, target_modules="all-linear"))
    llm, platform = make_llm(monkeypatch, llama)
    prompt = [5, 6, 7, 8]
    assert platform.last_runtime is not None
    counts = platform.last_runtime.counts

    def captured() -> int:
        before = counts["captured"]
        run(llm, [prompt], [None])
        return counts["captured"] - before

    assert captured() + captured() > 0 and captured() == 0
    first, again = run(llm, [prompt] * 2, [adapter] * 2), run(llm, [prompt] * 2, [adapter] * 2)
    assert [output.outputs[0].token_ids for output in first] == [output.outputs[0].token_ids for output in again]
    assert captured() == 0


def test_prompt_logprobs_of_an_adapted_head_are_those_of_its_row(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    adapter = make_adapter(llama, tmp_path / "head", 1, r=6, target_modules=["lm_head"])
    llm, _ = make_llm(monkeypatch, llama)
    prompt, params = [7, 9, 11, *range(20, 44)], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    given: Any = [{"prompt_token_ids": prompt}] * 2
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=[None, request(adapter)])
    for path, output in zip((None, adapter), outputs, strict=True):
        expected = PeftOracle(llama, path).logprobs(prompt)
        assert output.prompt_logprobs is not None
        for position, token_id in enumerate(prompt[1:], 1):
            ours = (output.prompt_logprobs[position] or {})[token_id].logprob
            assert abs(ours - float(expected[position - 1, token_id])) < TOLERANCE


def test_experts_and_absorbed_heads_are_adapted_in_groups_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_selection: None
):
    base = make_tiny_model("DeepseekV3ForCausalLM", tmp_path / "base", num_hidden_layers=2)
    targets: dict[str, Any] = {
        "target_modules": ["kv_b_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    first = make_adapter(base, tmp_path / "one", 1, r=3, **targets)
    heads = make_adapter(base, tmp_path / "heads", 2, r=5, target_modules=["kv_b_proj"])
    llm, _ = make_llm(monkeypatch, base, TritonAdapters)
    assert_parity(llm, base, [heads], prompts=[[3, 4]], max_tokens=2)
    assert_parity(llm, base, [first, heads, None], prompts=[[3, 4]], max_tokens=2)
