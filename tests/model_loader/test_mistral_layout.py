"""Mistral's own layout (params.json, consolidated.safetensors): it computes what the hub's layout of the same model does."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.tiny_models import make_tiny_model

from quire.config.hub import find_model
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.model_loader import load_model
from quire.platforms.cpu import CpuPlatform

MODULES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "q_proj": "attention.wq",
    "k_proj": "attention.wk", "v_proj": "attention.wv", "o_proj": "attention.wo", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "feed_forward.w1", "down_proj": "feed_forward.w2",
    "up_proj": "feed_forward.w3", "gate": "feed_forward.gate",
}  # fmt: skip


def own_name(name):
    parts = name.removesuffix(".weight").split(".")
    if "experts" in parts:
        module = f"feed_forward.experts.{parts[-2]}.{parts[-1]}"
    else:
        module = MODULES.get(".".join(parts)) or MODULES[parts[-1]]
    return f"layers.{parts[2]}.{module}.weight" if "layers" in parts else f"{module}.weight"


def in_pairs(tensor, heads):
    """Value i of a head's first half beside value i of its second."""
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def rewrite(source, target, float8=False, **facts):
    """Another layout of a checkpoint; and, of float8, its values in the first."""
    hf = json.loads((source / "config.json").read_text())
    rope = hf.get("rope_parameters") or {}
    params = {
        "dim": hf["hidden_size"], "n_layers": hf["num_hidden_layers"], "n_heads": hf["num_attention_heads"],
        "n_kv_heads": hf["num_key_value_heads"], "head_dim": hf.get("head_dim"), "vocab_size": hf["vocab_size"],
        "hidden_dim": hf["intermediate_size"], "norm_eps": hf["rms_norm_eps"], "rope_theta": rope.get("rope_theta", 1e4),
        "sliding_window": hf.get("sliding_window"), "max_seq_len": 256, "tied_embeddings": False, **facts,
    }  # fmt: skip
    heads, stored = {"q_proj": params["n_heads"], "k_proj": params["n_kv_heads"]}, {}
    worth = load_file(source / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        part = name.split(".")[-2]
        values = in_pairs(tensor, heads[part]) if part in heads else tensor
        own = own_name(name)
        if float8 and "_proj" in name:
            scale = tensor.abs().max() / 448
            stored[own] = (values / scale).to(torch.float8_e4m3fn)
            stored[own.removesuffix("weight") + "qscale_weight"] = scale
            stored[own.removesuffix("weight") + "qscale_act"] = torch.tensor(0.05)
            worth[name] = (tensor / scale).to(torch.float8_e4m3fn).float() * scale
        else:
            stored[own] = values.contiguous()
    target.mkdir()
    save_file(stored, target / "consolidated.safetensors")
    (target / "params.json").write_text(json.dumps(params))
    shutil.copytree(source, target / "worth")
    save_file(worth, target / "worth" / "model.safetensors")
    return target


def logprobs_of(path, **settings):
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, **settings}
    config = EngineArgs(model=str(path), **settings).create_engine_config()
    loaded = load_model(config, platform, torch.device("cpu"), 64, 16)
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence([5, 99, 301, 17, 5, 44, 200, 81, 9, 150], row=0))


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_it_computes_what_the_hubs_layout_does(architecture, tmp_path):
    source = make_tiny_model(architecture, tmp_path / "hub")
    facts = {"moe": {"num_experts": 4, "num_experts_per_tok": 2}} if architecture.startswith("Mixtral") else {}
    if facts:
        hf = json.loads((source / "config.json").read_text())
        facts["moe"] = {"num_experts": hf["num_local_experts"], "num_experts_per_tok": hf["num_experts_per_tok"]}
    target = rewrite(source, tmp_path / "own", **facts)
    actual, expected = logprobs_of(target, load_format="mistral"), logprobs_of(source)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_float8_and_its_scales_are_read(tmp_path):
    source = make_tiny_model("MistralForCausalLM", tmp_path / "hub")
    target = rewrite(
        source, tmp_path / "own", True, quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    )
    torch.testing.assert_close(logprobs_of(target), logprobs_of(target / "worth"), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_encoder": {"dim": 8}}, "has vision_encoder, which is not read in this layout"),
        ({"dim": None, "n_layers": 2}, "lacks hidden_dim"),
        ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight fp8_e4m3"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, change, message):
    params = {"dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 10, "norm_eps": 1e-5, "hidden_dim": 8} | change
    params = {name: value for name, value in params.items() if message != "lacks hidden_dim" or name != "hidden_dim"}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert find_model(str(tmp_path)).path == str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
