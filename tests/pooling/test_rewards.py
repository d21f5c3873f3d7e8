"""Reward models and rerankers: heads that Transformers has no class for, against a few lines of PyTorch."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.tiny_poolers import hidden_states, load_pooling_oracle, make_tiny_model

from quire import LLM, PoolingParams

from .conftest import SETTINGS, as_dicts


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model("Qwen2Model", tmp_path_factory.mktemp("qwen2"), hidden_size=64)


def with_head(base, folder, architecture, head):
    """A checkpoint of this architecture: the base's layers under `model.`, and the head's tensors."""
    make_copy = {f"model.{name}": tensor for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(make_copy | head, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_head(labels, hidden=64):
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "score.0.weight": (hidden, hidden),
        "score.0.bias": (hidden,),
        "score.2.weight": (labels, hidden),
        "score.2.bias": (labels,),
    }
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def apply_head(head, states_TD):
    first = torch.relu(states_TD @ head["score.0.weight"].T + head["score.0.bias"])
    return first @ head["score.2.weight"].T + head["score.2.bias"]


def test_a_reward_model_gives_each_token_its_number(base, tmp_path, prompts):
    head = random_head(1)
    path = with_head(base, tmp_path, "Qwen2ForRewardModel", head)
    oracle = load_pooling_oracle(base, "Qwen2Model")
    with LLM(str(path), **(SETTINGS | {"max_num_batched_tokens": 16})) as llm:
        outputs = llm.reward(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(
            output.outputs.data, apply_head(head, hidden_states(oracle, prompt)).numpy(), atol=1e-4
        )


def test_a_process_reward_model_gives_the_probabilities_of_its_steps(base, tmp_path, prompts):
    head = random_head(2)
    path = with_head(base, tmp_path, "Qwen2ForProcessRewardModel", head)
    oracle = load_pooling_oracle(base, "Qwen2Model")
    tag = 350
    prompts = [[tag if place % 4 == 3 else token for place, token in enumerate(prompt)] for prompt in prompts]
    config = {"step_tag_id": tag, "returned_token_ids": [1, 0]}
    with LLM(str(path), pooler_config=config, **(SETTINGS | {"max_num_batched_tokens": 16})) as llm:
        outputs = llm.reward(as_dicts(prompts), use_tqdm=False)
        (whole,) = llm.reward(
            as_dicts(prompts[:1]), pooling_params=PoolingParams(step_tag_id=prompts[0][0]), use_tqdm=False
        )
    assert len(whole.outputs.data) == 1
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = apply_head(head, hidden_states(oracle, prompt))[[token == tag for token in prompt]][
            :, [1, 0]
        ].softmax(-1)
        assert output.outputs.data.shape == expected.shape
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)


def test_internlm2s_reward_model_has_one_matrix(tmp_path, prompts):
    """Llama's layers under InternLM's names, which stores q, k and v together, KV head by KV head."""
    base = make_tiny_model("LlamaModel", tmp_path / "llama")
    config = json.loads((base / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        for old, new in INTERNLM2.items():
            name = name.replace(old, new)
        tensors[f"model.{name}"] = tensor
    size, queries = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        q, k, v = (tensors.pop(f"model.layers.{layer}.attention.{part}.weight") for part in ("q", "k", "v"))
        groups = zip(q.split(queries * size), k.split(size), v.split(size), strict=True)
        wqkv = torch.cat([matrix for group in groups for matrix in group])
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = wqkv
    tensors["v_head.weight"] = head = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["InternLM2ForRewardModel"]}))
    oracle = load_pooling_oracle(base, "LlamaModel")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.reward(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = hidden_states(oracle, prompt) @ head.T
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=1e-4)


INTERNLM2 = {
    "embed_tokens": "tok_embeddings", "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def test_a_generating_model_scores_by_its_logits_of_two_tokens(tmp_path, prompts):
    path = make_tiny_model("Qwen3ForCausalLM", tmp_path)
    oracle = load_pooling_oracle(path, "Qwen3ForCausalLM")
    yes, no = (tokenizer_id(path, token) for token in ("t", "f"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["f", "t"]}
    with LLM(str(path), hf_overrides=overrides, **(SETTINGS | {"skip_tokenizer_init": False})) as llm:
        outputs = llm.classify(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            last = oracle(torch.tensor([prompt])).logits[0, -1]
        expected = torch.stack([last[no], last[yes]]).softmax(0)[1]
        assert output.outputs.probs == pytest.approx([float(expected)], abs=1e-4)


def tokenizer_id(path, token):
    return json.loads((path / "tokenizer.json").read_text())["model"]["vocab"][token]


def test_a_decoder_without_a_causal_mask_sees_all_tokens(base, prompts):
    """gte-Qwen2 and the like: `is_causal` is false in config.json."""
    oracle = load_pooling_oracle(base, "Qwen2Model")
    options = {"hf_overrides": {"is_causal": False}, "pooler_config": {"use_activation": False}}
    with LLM(str(base), **(SETTINGS | {"max_num_batched_tokens": 160} | options)) as llm:
        outputs = llm.embed(as_dicts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        mask = {"full_attention": torch.zeros(1, 1, len(prompt), len(prompt))}
        expected = hidden_states(oracle, prompt, attention_mask=mask)[-1]
        np.testing.assert_allclose(output.outputs.embedding, expected.numpy(), atol=1e-4)
