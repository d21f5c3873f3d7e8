"""Adapters over bases of every kind: in number formats, over two ranks, of models that pool. The oracle is PEFT over the base's
values in a plain checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.engine.test_prompt_embeds import check as check_prompts_of_embeddings
from tests.lora.conftest import PROMPTS, assert_parity, request
from tests.oracles.gguf_models import write_gguf
from tests.oracles.model_driver import build_tiny
from tests.oracles.peft_adapters import make_adapter, make_virtual, randomize
from tests.oracles.quantized_models import FLOAT8, WEIGHT_ONLY, store
from tests.oracles.tiny_models import load_oracle, make_tiny_model
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle

from quire import LLM
from quire.distributed.communicator import SingleRank
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.adapters import AdapterPart
from quire.lora.kinds import read_adapter
from quire.lora.placement import Places

SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "max_logprobs": -1}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FORMATS = ("compressed fp8 weights", "gptq 4 bits, act order")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def check_format(llama: Path, tmp_path: Path, name: str) -> None:
    store(llama, tmp_path, (WEIGHT_ONLY | FLOAT8)[name])
    targets = ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head", "gate_proj"]
    plain = make_adapter(tmp_path / "worth", tmp_path / "plain", 1, r=4, target_modules=targets)
    dora = make_adapter(tmp_path / "worth", tmp_path / "dora", 2, r=4, target_modules=targets[:4], use_dora=True)
    llm = LLM(str(tmp_path), enable_lora=True, deterministic=True, **SETTINGS)
    assert_parity(llm, tmp_path / "worth", [None, plain, dora], PROMPTS[:2], max_tokens=3)
    with pytest.raises(ConfigError, match="quantized"):
        LLM(str(tmp_path), merge_lora=str(plain), **SETTINGS)


@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_over_a_quantized_base_is_added_to_what_the_base_is_worth(name: str, llama: Path, tmp_path: Path):
    check_format(llama, tmp_path, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted({*WEIGHT_ONLY, *FLOAT8} - {*FORMATS}))
def test_an_adapter_over_any_format_is_added_to_what_the_base_is_worth(name: str, llama: Path, tmp_path: Path):
    check_format(llama, tmp_path, name)


@pytest.mark.parametrize("kind", ["Q4_K", pytest.param("Q8_0", marks=pytest.mark.exhaustive)])
def test_an_adapter_over_a_gguf_file_is_added_to_what_the_file_is_worth(kind: str, tmp_path: Path):
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base", **wide)
    file = write_gguf(base, tmp_path, "llama", {"": kind, "token_embd": "F16", "output": "F16"})
    adapter = make_adapter(tmp_path / "worth", tmp_path / "adapter", scale=0.1, r=4, target_modules="all-linear")
    llm = LLM(str(file), enable_lora=True, deterministic=True, **SETTINGS)
    assert_parity(llm, tmp_path / "worth", [None, adapter], PROMPTS[:2], max_tokens=3)


def test_two_ranks_share_adapters_as_they_share_the_model(tmp_path: Path):
    base = make_tiny_model("MixtralForCausalLM", tmp_path / "base", num_hidden_layers=2, num_local_experts=3)
    every = make_adapter(base, tmp_path / "every", 1, r=8, target_modules="all-linear", use_rslora=True)
    ends = make_adapter(base, tmp_path / "ends", 2, r=4, target_modules=["embed_tokens", "lm_head", "k_proj"])
    dora = make_adapter(base, tmp_path / "dora", 3, r=4, target_modules=["o_proj", "v_proj"], use_dora=True)
    experts = make_adapter(base, tmp_path / "experts", 4, r=3, target_modules=["q_proj"], target_parameters=EXPERTS)
    tokens = make_adapter(base, tmp_path / "t", 5, r=2, target_modules=["v_proj"], trainable_token_indices=[3, 200])
    keys = make_virtual(base, tmp_path / "keys", "PREFIX_TUNING", 4)
    settings = SETTINGS | {"enable_prompt_embeds": True, "max_model_len": 128}
    llm = LLM(str(base), enable_lora=True, tensor_parallel_size=2, **settings)
    try:
        assert_parity(llm, base, [None, every, ends, dora, experts, keys, tokens], PROMPTS[:2], max_tokens=3)
        assert llm.list_loras() == {2, 3, 4, 5, 6, 7} and llm.remove_lora(2) and llm.list_loras() == {3, 4, 5, 6, 7}
        check_prompts_of_embeddings(llm, load_oracle(base))
    finally:
        llm.shutdown()


class OneOfTwo(SingleRank):
    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_each_of_two_ranks_has_its_own_latent_heads_of_an_adapter(tmp_path: Path, kept_selection: None):
    ops.select("any")
    base = make_tiny_model("DeepseekV3ForCausalLM", tmp_path / "base", num_hidden_layers=1)
    adapter = read_adapter(str(make_adapter(base, tmp_path / "heads", 2, r=5, target_modules=["kv_b_proj"])))

    def parts_of(communicator: SingleRank) -> dict[str, AdapterPart]:
        model = build_tiny(base, communicator=communicator)
        places = Places(model.spec, model.sources, model.plan, lambda name: None, model.fixed)
        return places.place(adapter, torch.float32)

    whole, *shares = (parts_of(each) for each in (SingleRank(), OneOfTwo(0), OneOfTwo(1)))
    for name, part in whole.items():
        for mine, first, second in zip(
            *((each.down, each.up) for each in (part, *(s[name] for s in shares))), strict=True
        ):
            if mine.ndim == 3:  # a matrix for each head
                assert len(first) == len(second) == len(mine) // 2
                torch.testing.assert_close(torch.cat([first, second]), mine)
            else:  # the latent, which all heads share
                assert torch.equal(first, mine) and torch.equal(second, mine)
    assert sorted(whole) == ["layers.0.kv_b to latent", "layers.0.kv_b to values"]


@pytest.mark.exhaustive
def test_two_ranks_share_adapters_of_latent_heads(tmp_path: Path):
    base = make_tiny_model("DeepseekV3ForCausalLM", tmp_path / "base", num_hidden_layers=2)
    both = make_adapter(
        base, tmp_path / "both", 1, r=3, target_modules=["kv_b_proj", "o_proj"], target_parameters=EXPERTS
    )
    heads = make_adapter(base, tmp_path / "heads", 2, r=5, target_modules=["kv_b_proj", "q_b_proj"])
    llm = LLM(str(base), enable_lora=True, tensor_parallel_size=2, **SETTINGS)
    try:
        assert_parity(llm, base, [None, both, heads], PROMPTS[:2], max_tokens=3)
    finally:
        llm.shutdown()


@torch.no_grad()
def expected_vector(path: Path, architecture: str, adapter: Path | None, prompt: Sequence[int]) -> np.ndarray:
    """What Transformers and PEFT give for a prompt: the last token's, of length 1."""
    oracle = load_pooling_oracle(path, architecture)
    if adapter is not None:
        oracle = peft.PeftModel.from_pretrained(oracle, str(adapter)).eval().base_model.model
    vector = hidden_states(oracle, prompt)[-1]
    return (vector / vector.norm()).numpy()


def test_embeddings_of_a_model_that_pools_are_those_of_each_prompts_adapter(llama: Path, tmp_path: Path):
    model = peft.get_peft_model(
        load_pooling_oracle(llama, "LlamaModel"),
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="FEATURE_EXTRACTION"),
    )
    randomize(model, 1, 0.3)
    model.save_pretrained(str(tmp_path / "adapter"))
    settings = {name: value for name, value in SETTINGS.items() if name != "max_logprobs"}
    llm = LLM(str(llama), enable_lora=True, runner="pooling", convert="embed", **settings)
    adapters = [None, request(tmp_path / "adapter"), None, request(tmp_path / "adapter")]
    prompts = [list(PROMPTS[0]), list(PROMPTS[0]), list(PROMPTS[2]), list(PROMPTS[2])]
    outputs = llm.embed([{"prompt_token_ids": each} for each in prompts], lora_request=adapters, use_tqdm=False)
    for output, prompt, adapter in zip(outputs, prompts, adapters, strict=True):
        path = None if adapter is None else Path(adapter.lora_path)
        expected = expected_vector(llama, "LlamaModel", path, prompt)
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
