"""Adapters across sleep and new weights of the base, and the memory that is set aside for them."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.lora.conftest import PROMPTS, assert_parity, request, run
from tests.oracles.peft_adapters import make_adapter
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.engine.arg_utils import EngineArgs
from quire.platforms import current_platform
from quire.worker.dry_run import explain_without_weights

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 8, "max_logprobs": -1}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_tiny_model("Qwen2ForCausalLM", tmp_path / "base", tie_word_embeddings=False)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_has_given_adapters_back_and_computes_with_them_as_before(
    base: Path, tmp_path: Path, level: int
):
    adapter = request(make_adapter(base, tmp_path / "a", 1, r=4, target_modules="all-linear"))
    llm = LLM(str(base), **SETTINGS)
    before = run(llm, PROMPTS, [adapter, None, adapter])
    assert llm.collective_rpc("explain")[0]["adapters"]["loaded_bytes"] > 0
    llm.sleep(level)
    if level == 1:
        assert llm.collective_rpc("explain")[0]["adapters"]["loaded_bytes"] == 0
    llm.wake_up()
    after = run(llm, PROMPTS, [adapter, None, adapter])
    assert [output.outputs[0].token_ids for output in before] == [output.outputs[0].token_ids for output in after]


def test_after_new_weights_of_the_base_adapters_are_made_for_them(base: Path, tmp_path: Path):
    new = make_tiny_model("Qwen2ForCausalLM", tmp_path / "new", seed=7, tie_word_embeddings=False)
    plain = make_adapter(base, tmp_path / "biased", 1, r=4, target_modules=["q_proj", "v_proj"], bias="all")
    dora = make_adapter(base, tmp_path / "dora", 2, r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    llm = LLM(str(base), **SETTINGS)
    assert_parity(llm, base, [plain, dora], prompts=PROMPTS[:1], max_tokens=3)
    llm.reload_weights(str(new))
    assert_parity(llm, new, [plain, dora], prompts=PROMPTS[:1], max_tokens=3)


def test_memory_is_set_aside_for_adapters(base: Path):
    def memory(**settings: object) -> dict[str, int]:
        config = EngineArgs(str(base), dtype="float32", max_model_len=64, **settings).create_engine_config()
        return explain_without_weights(config, current_platform("cpu"))["memory"]

    two = memory(enable_lora=True, max_loras=2, max_lora_rank=8)
    four = memory(enable_lora=True, max_loras=4, max_lora_rank=16)
    assert "adapters" not in memory() and four["adapters"] == 4 * two["adapters"] > 0
    config = LLM(str(base), max_loras=2, max_lora_rank=8, **SETTINGS)
    assert config.collective_rpc("explain")[0]["adapters"]["reserved_bytes"] == two["adapters"]


def test_adapters_change_only_the_modules_that_may_be_changed(base: Path, tmp_path: Path):
    whole = make_adapter(base, tmp_path / "whole", 1, r=4, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"])
    part = Path(shutil.copytree(whole, tmp_path / "part"))
    tensors = load_file(part / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".q_proj." not in name and ".k_proj." not in name}
    save_file(kept, part / "adapter_model.safetensors")
    assert 0 < len(kept) < len(tensors)
    expected = run(LLM(str(base), **SETTINGS), PROMPTS, [request(part)] * len(PROMPTS))
    llm = LLM(str(base), lora_target_modules=["o_proj", "gate_up_proj"], **SETTINGS)
    found = run(llm, PROMPTS, [request(whole)] * len(PROMPTS))
    assert [each.outputs[0].logprobs for each in found] == [each.outputs[0].logprobs for each in expected]
