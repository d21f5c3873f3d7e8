"""Mixtures of experts in the decoder: weights under many names, shares of ranks, buffers, numbers, and the fused way."""

import dataclasses
import json

import pytest
import torch
from tests.models.test_parity_moe import SHAPES
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.tiny_models import load_oracle

from quire.attention.reference import ReferenceBackend
from quire.config import HFConfig
from quire.errors import ConfigError
from quire.kernels import ops, registry
from quire.kernels.cpu import recording
from quire.layers.decoder import Decoder
from quire.layers.decoder_layer import modules_of
from quire.layers.interface import ModelContext
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import sources_of
from quire.model_loader.device_reader import UploadedTensor
from quire.model_loader.dummy import dummy_weights
from quire.model_loader.loader import _wanted_rows, check_checkpoint
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.models.registry import ModelRegistry
from quire.models.spec import DecoderSpec, MoE

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]
QWEN3 = "Qwen3MoeForCausalLM"


def spec_of(path) -> DecoderSpec:
    hf = HFConfig(json.loads((path / "config.json").read_bytes()))
    return ModelRegistry.resolve(hf.architectures).make_spec(hf)


def build(spec: DecoderSpec, **settings) -> Decoder:
    types = dict.fromkeys(("dtype", "kv_dtype", "activation_dtype"), settings.pop("dtype", torch.float32))
    defaults = types | {"block_size": 16, "max_tokens": 64, "max_logits": 16}
    return Decoder(spec, ModelContext(backend=ReferenceBackend(), **(defaults | settings)))


def load(path, **settings) -> Decoder:
    model = build(spec_of(path), **settings)
    model.load_weights(SafetensorsReader(path).stream())
    return model


def test_layers_without_experts_are_as_config_says(tiny):
    spec = spec_of(tiny(QWEN3, decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3]))
    assert [isinstance(mlp, MoE) for mlp in spec.mlps()] == [False, True, False, False]


def test_names_of_published_configs_are_understood():
    values = {
        "architectures": [QWEN3], "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "vocab_size": 1000, "intermediate_size": 6144, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6, "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }  # fmt: skip
    spec = ModelRegistry.resolve(QWEN3).make_spec(HFConfig(values))
    sources = sources_of(modules_of(spec), spec, ParallelPlan())
    assert sources["model.layers.1.mlp.experts.127.up_proj.weight"].shape == (768, 2048)
    assert sources["model.layers.0.mlp.experts.64.down_proj.weight"].shape == (2048, 768)
    assert sources["model.layers.0.mlp.gate.weight"].shape == (128, 2048)


def test_a_missing_expert_is_named(reference_kernels, tiny):
    model = build(spec_of(tiny(QWEN3)))
    weights = dict(dummy_weights(model.sources.values(), model.spec, 0, torch.float32))
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"Missing \(1\): model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("architecture", [QWEN3, "Qwen2MoeForCausalLM", "MixtralForCausalLM"])
def test_the_shares_of_two_ranks_add_up_to_the_whole(architecture, reference_kernels, tiny):
    path = tiny(architecture, num_hidden_layers=1)
    whole = load(path)
    shares = [load(path, plan=ParallelPlan(2, rank)) for rank in range(2)]
    x_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    num_tokens = torch.tensor([9])
    outs = []
    for model in (whole, *shares):
        mixture = model._layers[0].mlp.mixture
        assert mixture is not None
        outs.append(torch.empty_like(x_TD))
        mixture.run(x_TD, outs[-1], num_tokens, model.workspace.tokens(9))
    torch.testing.assert_close(outs[1] + outs[2], outs[0], rtol=1e-4, atol=1e-5)
    assert outs[1].abs().max() > 0.1 * outs[0].abs().max()


def test_random_weights_serve_every_expert_another_matrix(reference_kernels, tiny):
    model = build(spec_of(tiny(QWEN3)))
    model.load_weights(dummy_weights(model.sources.values(), model.spec, 0, torch.float32))
    experts = model._layers[0].mlp.mixture._experts.weights
    assert experts.gate_up_E2ID.shape == (8, 80, 64)
    assert experts.down_EDI.shape == (8, 64, 40)
    assert len({tuple(row.tolist()) for row in experts.gate_up_E2ID[:, 0, :4]}) == 8


@pytest.mark.parametrize("name", ["gpt-oss", "ernie4.5 moe", "nemotron-h: experts without gates"])
def test_random_weights_serve_mixtures_of_every_kind(name, reference_kernels, tiny):
    architecture, overrides = SHAPES[name]
    model = build(spec_of(tiny(architecture, **overrides)))
    model.load_weights(dummy_weights(model.sources.values(), model.spec, 0, torch.float32))
    if not overrides.get("layers_block_type"):  # recurrent layers want pages of their own
        logprobs = ModelDriver(model).prefill(Sequence(list(TOKENS), row=0))
        assert logprobs.isfinite().all() and logprobs.std() > 0.5


def test_numbers_tell_all_parameters_from_those_that_a_token_uses(reference_kernels, tiny):
    path = tiny(QWEN3)
    report = load(path).describe()
    total = sum(parameter.numel() for parameter in load_oracle(path).parameters())
    one_expert = 3 * 64 * 40
    assert report["parameters"] == total
    assert report["active_parameters"] == total - 3 * (8 - 3) * one_expert
    assert report["weight_bytes"] == 4 * total
    assert "active_parameters" not in load(tiny("Qwen3ForCausalLM")).describe()


def test_a_step_with_mixtures_is_recorded_where_kernels_are_native(kernels, tiny):
    model = load(tiny("Qwen2MoeForCausalLM"))
    driver = ModelDriver(model)
    expected = driver.prefill(Sequence(list(TOKENS), row=0))
    step = driver.step_inputs
    recorded = recording.record(lambda: model.forward(step), 12, 3, runs=False)
    assert (recorded is None) == (kernels == "reference")
    if recorded is not None:
        model.workspace.tokens(12).residual_TD.zero_()
        recorded.replay(12, 3)
        torch.testing.assert_close(driver._all_logprobs(12), expected, rtol=0, atol=0)


def test_models_with_mixtures_are_not_fused_without_kernels_for_them(tiny, restored_choice, monkeypatch):
    ops.select("any")
    native = dataclasses.replace(ops.choices()["norm_linear"].chosen, platform="cuda")
    monkeypatch.setitem(registry._choices, "norm_linear", registry.Choice(native, []))
    assert build(spec_of(tiny("Qwen3ForCausalLM")))._operations.is_fused
    assert not build(spec_of(tiny(QWEN3)))._operations.is_fused


def load_stacked(path, **settings):
    """The first layer's experts, from either layout."""
    model, reader = build(spec_of(path), **settings), SafetensorsReader(path)
    check_checkpoint(model, reader.infos)
    model.load_weights(reader.stream())
    return model._layers[0].mlp.mixture._experts.weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_experts_that_a_checkpoint_has_in_one_tensor_are_the_same(rank, dtype, reference_kernels, tiny, tmp_path):
    apart = tiny(QWEN3, num_hidden_layers=1)
    load_oracle(apart).save_pretrained(tmp_path, save_original_format=False)
    infos = SafetensorsReader(tmp_path).infos
    assert infos["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 80, 64)
    assert not any(".experts.0." in name for name in infos)
    weights = [load_stacked(path, plan=ParallelPlan(2, rank), dtype=dtype) for path in (apart, tmp_path)]
    assert torch.equal(weights[0].gate_up_E2ID, weights[1].gate_up_E2ID)
    assert torch.equal(weights[0].down_EDI, weights[1].down_EDI)


def test_experts_in_one_tensor_come_to_a_device_once(reference_kernels, tiny, tmp_path):
    load_oracle(tiny(QWEN3, num_hidden_layers=1)).save_pretrained(tmp_path, save_original_format=False)
    expected, reader = load_stacked(tmp_path), SafetensorsReader(tmp_path)
    model = build(spec_of(tmp_path))
    check_checkpoint(model, reader.infos)
    wanted = _wanted_rows(model, reader)
    assert wanted["model.layers.0.mlp.experts.gate_up_proj"] == [slice(0, 8)]
    model.load_weights(
        (name, UploadedTensor([(rows, tensor[rows]) for rows in wanted[name]])) for name, tensor in reader.stream()
    )
    experts = model._layers[0].mlp.mixture._experts.weights
    assert torch.equal(experts.gate_up_E2ID, expected.gate_up_E2ID)
    assert torch.equal(experts.down_EDI, expected.down_EDI)


def test_a_stacked_tensor_of_another_shape_is_refused(reference_kernels, tiny, tmp_path):
    load_oracle(tiny(QWEN3, num_hidden_layers=1)).save_pretrained(tmp_path, save_original_format=False)
    spec = spec_of(tmp_path)
    mlp = dataclasses.replace(spec.mlps()[0], intermediate=44)
    with pytest.raises(ConfigError, match=r"gate_up_proj is \[8, 80, 64\], config\.json asks for \[8, 88, 64\]"):
        check_checkpoint(build(dataclasses.replace(spec, mlp=mlp)), SafetensorsReader(tmp_path).infos)
