"""Inkling against Transformers in float32: windows and distances that end in one step or over many, convolutions over borders of
steps and pages, a shared prefix, two ranks, and the names of published checkpoints."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.test_models_over_ranks import check
from tests.models.test_parity import NEW_TOKENS, TOLERANCE, oracle_logprobs, prompts, run_mixed
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import randomize, tiny_values

from quire import LLM
from quire.config import HFConfig
from quire.errors import ConfigError, RequestError
from quire.models.registry import ModelRegistry

NAME = "InklingForCausalLM"
PUBLISHED = "InklingForConditionalGeneration"
SHAPES: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "no growth, width 2, one shared expert": {"log_scaling_n_floor": None, "conv_kernel_size": 2, "n_shared_experts": 1},
    "all sparse, kinds of layers by default, distances beyond any prompt": {
        "layer_types": None, "local_layer_ids": [1, 2], "mlp_layer_types": None, "rel_extent": 200, "n_shared_experts": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_give_transformers_tokens_and_logprobs(name, kernels, tiny):
    path = tiny(NAME, **SHAPES[name])
    for token_ids, logprobs in run_mixed(ModelDriver(build_tiny(path)), seed=len(name)):
        expected = oracle_logprobs(path, tuple(token_ids))[:-1]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        first_new = len(token_ids) - NEW_TOKENS
        assert token_ids[first_new:] == expected[first_new - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
def test_any_page_size_gives_the_same(block_size, reference_kernels, tiny):
    path = tiny(NAME)
    (*_, token_ids) = prompts()
    driver = ModelDriver(build_tiny(path, block_size=block_size), max_rows=2, pages_a_row=96)
    logprobs = driver.prefill(Sequence(token_ids, row=1), chunk=16)
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(token_ids)), rtol=0, atol=TOLERANCE)


def test_a_prefix_that_another_request_computed_may_be_shared(kernels, tiny):
    path = tiny(NAME)
    driver = ModelDriver(build_tiny(path))
    *_, first, second = prompts()
    second = first[:32] + second[:20]
    driver.prefill(Sequence(first, row=0), chunk=20)
    for group in driver.step_inputs.attention:
        group.block_table[1, :2] = group.block_table[0, :2]
    logprobs = driver.prefill(Sequence(second, row=1, computed=32))
    torch.testing.assert_close(logprobs, oracle_logprobs(path, tuple(second))[32:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kernels_of", ["reference", "native"])
def test_two_ranks_compute_what_one_computes(kernels_of, tmp_path, restored_choice):
    check(2, tmp_path, {"inkling": (NAME, {})}, kernels_of)


def test_rows_of_the_head_behind_the_vocabulary_are_of_no_token(reference_kernels, tiny):
    path, (*_, token_ids) = tiny(NAME, unpadded_vocab_size=380), prompts()
    token_ids = [min(token, 379) for token in token_ids]
    logprobs = ModelDriver(build_tiny(path)).prefill(Sequence(token_ids, row=0))
    expected = oracle_logprobs(path, tuple(token_ids))
    assert logprobs.shape[-1] == expected.shape[-1] == 380
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
    llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", max_num_seqs=2, max_model_len=64)
    with pytest.raises(RequestError, match="token id 380"):
        llm.generate([{"prompt_token_ids": [5, 380]}], use_tqdm=False)


def test_a_published_checkpoint_is_read_by_its_own_names(reference_kernels, tmp_path):
    from transformers import InklingConfig, InklingForConditionalGeneration

    eyes = {"hidden_size": 16, "n_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    ears = {"n_mel_bins": 4, "mel_vocab_size": 8}
    config = InklingConfig(text_config=tiny_values(NAME), vision_config=eyes, audio_config=ears)
    config._attn_implementation = "eager"
    model = InklingForConditionalGeneration(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [PUBLISHED]
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {
        "model.llm.layers.1.mlp.experts.w13_weight",
        "model.llm.unembed.weight",
        "model.audio.encoder.weight",
    } <= names
    (*_, token_ids) = prompts()
    logprobs = ModelDriver(build_tiny(tmp_path)).prefill(Sequence(token_ids, row=0), chunk=30)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)


def test_published_configs_may_use_other_names_of_fields(tiny):
    values = json.loads((tiny(NAME) / "config.json").read_bytes())
    make_spec = ModelRegistry.resolve(NAME).make_spec
    theirs = {"sconv_kernel_size": "conv_kernel_size", "model_max_length": "max_position_embeddings"}
    theirs |= {"sliding_window": "sliding_window_size", "embedding_multiplier": "logits_mup_width_multiplier"}
    renamed = {name: value for name, value in values.items() if name not in theirs.values()}
    renamed |= {name: values[ours] for name, ours in theirs.items()}
    sizes = {
        "dense_intermediate_size": values["intermediate_size"],
        "intermediate_size": values["moe_intermediate_size"],
    }
    renamed = {name: value for name, value in (renamed | sizes).items() if name != "moe_intermediate_size"}
    assert make_spec(HFConfig(renamed)) == make_spec(HFConfig(values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink=False of config.json is not supported"),
        ({"layer_types": ["hybrid", "attention"] * 2}, "layer_types of config.json has 'attention'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(changes, message, tiny):
    config = json.loads((tiny(NAME) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        ModelRegistry.resolve(NAME).make_spec(HFConfig(config | changes))
