"""Checkpoints in every number format, through the engine: they give what their values in a plain checkpoint give."""

import dataclasses
import json
import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles import quantized_models
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.quantized_models import FLOAT8, ROUNDING, WEIGHT_ONLY, store
from tests.oracles.quantized_variants import VARIANTS
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.config import HFConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import ops, packed
from quire.kernels.types import Int8Weight, PackedWeight
from quire.layers.assembly import Assembler
from quire.layers.decoder_layer import modules_of
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import canonical_name, names_within, sources_of
from quire.model_loader import load_model
from quire.models.registry import ModelRegistry
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Explained, UploadStream
from quire.quantization import join, online
from quire.quantization.registry import linear_method

MLP = ("gate_up", "down")
SPLIT = (
    "gptq 4 bits",
    "gptq 8 bits, asymmetric, v2",
    "awq",
    "compressed 4 bits, asymmetric",
    "compressed mxfp4",
    "modelopt nvfp4",
)
UP = "model.layers.0.mlp.up_proj"
TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cpu():
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)  # inputs as they are: the faster kernels round them to int8
    return platform


def load(platform, path, **settings):
    config = EngineArgs(model=str(path), dtype="float32", **settings).create_engine_config()
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def logprobs_of(loaded):
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(TOKENS), row=0))


def generate(path, **settings):
    """Greedy tokens and the logprobs of each step's best."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    llm = LLM(str(path), dtype="float32", max_model_len=64, deterministic=True, **settings)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS}], params)
    best = output.outputs[0]
    return list(best.token_ids), [
        step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)
    ]


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *FLOAT8])
def test_a_checkpoint_is_worth_its_values(cpu, llama, tmp_path, name):
    store(llama, tmp_path, (WEIGHT_ONLY | FLOAT8)[name])
    actual, expected = logprobs_of(load(cpu, tmp_path)), logprobs_of(load(cpu, tmp_path / "worth"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
    assert (logprobs_of(load(cpu, llama)) - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gptq 4 bits, act order", "awq", "compressed int8 weights", "bitsandbytes nf4"])
def test_the_engine_generates_what_it_would_with_the_values(llama, tmp_path, name):
    store(llama, tmp_path, WEIGHT_ONLY[name])
    tokens, logprobs = generate(tmp_path)
    expected_tokens, expected_logprobs = generate(tmp_path / "worth")
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ROUNDING)
def test_int8_activations_move_logprobs_a_little(cpu, llama, tmp_path, name, monkeypatch):
    store(llama, tmp_path, ROUNDING[name])
    loaded = load(cpu, tmp_path)
    expected = logprobs_of(load(cpu, tmp_path / "worth"))
    assert isinstance(loaded.model._layers[0].mixers[0].linears["qkv"], Int8Weight)
    assert 1e-4 < (logprobs_of(loaded) - expected).abs().mean() < 0.2


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_stay_small(cpu, llama, tmp_path, name):
    """All but those whose blocks go over the ends of rows."""
    store(llama, tmp_path, WEIGHT_ONLY[name])
    loaded = load(cpu, tmp_path)
    weights = {"qkv": loaded.model._layers[1].mixers[0].linears["qkv"], **loaded.model._layers[1].mlp.linears}
    kinds = {kind for kind, weight in weights.items() if isinstance(weight, PackedWeight)}
    assert kinds == {"qkv", "gate_up", "down"} - ({"down"} if "nf4" in name else set())


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 small blocks", "compressed fp8 blocks", "compressed fp8 weights"])
def test_float8_with_activations_as_they_are_stays_small_where_the_device_knows_it(float8_cpu, llama, tmp_path, name):
    store(llama, tmp_path, FLOAT8[name])
    loaded, worth = load(float8_cpu, tmp_path), load(float8_cpu, tmp_path / "worth")
    weight = loaded.model._layers[0].mixers[0].linears["qkv"]
    assert isinstance(weight, PackedWeight) and weight.data.dtype is torch.float8_e4m3fn
    torch.testing.assert_close(logprobs_of(loaded), logprobs_of(worth), rtol=0, atol=1e-3)
    kept = loaded.model._layers[0].mixers[0].linears["out"]
    small, plain = (each.explain()["model"]["weight_bytes"] for each in (loaded, worth))
    assert isinstance(kept, PackedWeight) and small < 0.6 * plain


def describe(platform, path):
    return load(platform, path).explain()["model"]


def test_explain_names_the_format_and_counts_its_bytes(cpu, llama, tmp_path):
    worth = store(llama, tmp_path, WEIGHT_ONLY["awq"])
    report, plain = describe(cpu, tmp_path), describe(cpu, tmp_path / "worth")
    matrices = [tensor for name, tensor in worth.items() if quantized_models.is_matrix(name)]
    saved = sum(tensor.numel() * 4 - tensor.numel() // 2 - tensor.numel() // 32 * 8 for tensor in matrices)
    assert report["quantization"] == "awq"
    assert report["matrices"] == {"int4 (AWQ), groups of 32": 21, "plain": 1}
    assert load(cpu, tmp_path, quantization="awq_marlin").model.describe()["quantization"] == "awq"
    assert plain["weight_bytes"] - report["weight_bytes"] == saved
    assert report["parameters"] == plain["parameters"]


def test_float8_on_a_cpu_says_what_it_takes(cpu, llama, tmp_path, caplog):
    store(llama, tmp_path, FLOAT8["fbgemm"])
    with caplog.at_level("WARNING", logger="quire"):
        report = describe(cpu, tmp_path)
    assert (
        "21 matrices stored as float8, a scale a channel were made plain and took 0.00 GiB: CPUs have no fp8"
        in caplog.text
    )
    assert report["weight_bytes"] == describe(cpu, tmp_path / "worth")["weight_bytes"]
    assert report["matrices"] == {"float8, a scale a channel, made plain": 21, "plain": 1}


def test_matrices_that_a_checkpoint_left_plain_stay_so(cpu, llama, tmp_path):
    """Be it that a list says so, or (as GPTQ has no list) only the names of tensors."""
    for name, change in (("awq", {"modules_to_not_convert": ["self_attn"]}), ("gptq 4 bits", {}), ("fbgemm", {})):
        folder = tmp_path / name
        store(llama, folder, (WEIGHT_ONLY | FLOAT8)[name], plain="self_attn")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        loaded = load(cpu, folder)
        torch.testing.assert_close(logprobs_of(loaded), logprobs_of(load(cpu, folder / "worth")), rtol=0, atol=1e-3)
        assert not isinstance(loaded.model._layers[0].mixers[0].linears["qkv"], PackedWeight)
        assert isinstance(loaded.model._layers[0].mlp.linears["down"], PackedWeight) == (name != "fbgemm")


def test_parts_with_other_bits_and_groups_are_joined_without_loss(cpu, llama, tmp_path):
    """Two groups of a compressed-tensors checkpoint: values in 8 bits, queries and keys in 4."""
    store(llama, tmp_path / "v", quantized_models.compressed_packed(8, 32), plain="(?<!v_proj).weight")
    form = quantized_models.compressed_packed(4, 16, symmetric=False)
    store(tmp_path / "v", tmp_path / "all", form, plain="v_proj")
    worth = load_file(tmp_path / "all/worth/model.safetensors")
    worth = {name: tensor for name, tensor in worth.items() if "v_proj" not in name}
    worth |= {k: t for k, t in load_file(tmp_path / "v/worth/model.safetensors").items() if "v_proj" in k}
    save_file(worth, tmp_path / "all/worth/model.safetensors")
    config = json.loads((tmp_path / "all/worth/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "all/worth/config.json").write_text(json.dumps(config))
    config = json.loads((tmp_path / "all/config.json").read_text())
    eight = quantized_models.compressed_packed(8, 32).section["config_groups"]["group_0"] | {"targets": ["re:.*v_proj"]}
    config["quantization_config"]["config_groups"]["group_1"] = eight
    (tmp_path / "all/config.json").write_text(json.dumps(config))
    loaded = load(cpu, tmp_path / "all")
    assert isinstance(loaded.model._layers[0].mixers[0].linears["qkv"], PackedWeight)
    expected = logprobs_of(load(cpu, tmp_path / "all/worth"))
    torch.testing.assert_close(logprobs_of(loaded), expected, rtol=0, atol=1e-3)


def assemble(path, plan):
    """Every matrix's values on one rank."""
    hf = HFConfig(json.loads((path / "config.json").read_bytes()))
    spec = ModelRegistry.resolve(hf.architectures).make_spec(hf)
    method, tensors = linear_method(None, hf), load_file(path / "model.safetensors")
    method.see_names(names_within(tensors, spec))
    sources = sources_of(modules_of(spec), spec, plan, method, tensors)
    assembler = Assembler(sources, plan, torch.float32, torch.device("cpu"), method)
    finished = [assembler.add(canonical_name(name, sources, spec), tensor) for name, tensor in tensors.items()]
    assert not assembler.missing()
    weights = {module.name: weight for module, weight in filter(None, finished)}
    return {name: join.dense(weight, torch.float32) for name, weight in weights.items() if name.endswith(MLP)}


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_have_their_rows_and_columns(llama, tmp_path, name, monkeypatch):
    ops.select("any")
    path = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", intermediate_size=128)
    worth = store(path, tmp_path / "stored", WEIGHT_ONLY[name])
    for rank in range(2):
        weights = assemble(tmp_path / "stored", ParallelPlan(2, rank))
        down = worth["model.layers.1.mlp.down_proj.weight"]
        torch.testing.assert_close(weights["layers.1.down"], down[:, rank * 64 : rank * 64 + 64], atol=1e-6, rtol=1e-6)
        parts = [worth[f"model.layers.1.mlp.{part}_proj.weight"][rank * 64 : rank * 64 + 64] for part in ("gate", "up")]
        torch.testing.assert_close(weights["layers.1.gate_up"], torch.cat(parts), atol=1e-6, rtol=1e-6)


CUT_ANYHOW = {
    name: form for name, form in (WEIGHT_ONLY | FLOAT8).items() if name not in ("modelopt nvfp4", "modelopt fp8")
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gptq 4 bits", "bitsandbytes nf4") else pytest.mark.exhaustive)
        for name in [*CUT_ANYHOW, "hqq 4 bits", "hqq 3 bits", "gptq 3 bits"]
    ],
)
def test_a_matrix_that_cannot_be_read_in_parts_is_read_whole(llama, tmp_path, name):
    """Columns 0 to 48 of 96 end within a group."""
    ops.select("any")
    worth = store(llama, tmp_path, (CUT_ANYHOW | VARIANTS)[name])
    for rank in range(2):
        weights = assemble(tmp_path, ParallelPlan(2, rank))
        down = worth["model.layers.1.mlp.down_proj.weight"][:, rank * 48 : rank * 48 + 48]
        torch.testing.assert_close(weights["layers.1.down"], down, atol=1e-6, rtol=1e-6)
        parts = [worth[f"model.layers.1.mlp.{part}_proj.weight"].chunk(2)[rank] for part in ("gate", "up")]
        torch.testing.assert_close(weights["layers.1.gate_up"], torch.cat(parts), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["gptq 4 bits, act order", "compressed 4 bits, act order"])
def test_columns_in_the_order_of_activations_are_split_as_values(llama, tmp_path, name):
    ops.select("any")
    path = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", intermediate_size=128)
    worth = store(path, tmp_path / "stored", WEIGHT_ONLY[name])
    for rank in range(2):
        down = worth["model.layers.1.mlp.down_proj.weight"].chunk(2, dim=1)[rank]
        weights = assemble(tmp_path / "stored", ParallelPlan(2, rank))
        torch.testing.assert_close(weights["layers.1.down"], down, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_plain_checkpoint_is_rounded_when_it_is_loaded(cpu, llama, kind):
    loaded, plain = load(cpu, llama, quantization=kind), load(cpu, llama)
    weight = loaded.model._layers[1].mlp.linears["down"]
    assert isinstance(weight, PackedWeight)
    moved = (logprobs_of(loaded) - logprobs_of(plain)).abs().mean()
    assert 1e-4 < moved < (0.1 if kind == "int8" else 1.0)
    assert describe(cpu, llama)["weight_bytes"] > loaded.explain()["model"]["weight_bytes"]


def test_rounding_to_int4_moves_a_weight_by_no_more_than_half_a_step(llama):
    ops.select("any")
    values = load_file(llama / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    for make, steps in ((online.round_to_int8, 254), (online.round_to_int4, 15)):
        weight = make(values, None, torch.float32)
        scale = weight.scale.repeat_interleave(values.shape[1] // weight.scale.shape[1], 1)
        assert ((packed.dequantize(weight) - values).abs() <= scale * 0.51).all()
        assert (scale <= (values.amax() - values.amin()) * 2 / steps).all()


def test_scales_made_at_load_fit_in_sixteen_bits():
    ops.select("any")
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for make in (online.round_to_int8, online.round_to_int4):
        weight = make(values, None, torch.float32)
        for numbers in filter(lambda tensor: tensor is not None, (weight.scale, weight.zero)):
            assert torch.equal(numbers.half().float(), numbers)


def test_outliers_get_the_finer_groups(llama):
    ops.select("any")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=generator)
    assert online.round_to_int4(values, None, torch.float32).scale.shape[1] == 4
    values[:, ::64] *= 20
    assert online.round_to_int4(values, None, torch.float32).scale.shape[1] == 8


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}}
MARLIN = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": GROUPS}
REFUSED = [
    ({"quant_method": "gptq", "bits": 1}, "bits=1, which is not supported; supported: 2 to 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'.* gptq, gptq_v2"),
    ({"quant_method": "awq", "bits": 8}, "bits=8, which is not supported; supported: 4"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "version='gemv_fast'.*supported: gemm, exllama, ipex, gemv"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'.*FP8, NVFP4"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit and load_in_8bit=False"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "'af4'.*supported: nf4, fp4"),
    ({"quant_method": "torchao", "quant_type": "int4wo"}, "quant_type='int4wo'.*an object with `default`"),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 1}}},
        r"quant_type\._version=1, .*supported: 2",
    ),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "GemliteUIntXWeightOnlyConfig"}}},
        "quant_type='GemliteUIntXWeightOnlyConfig', .*Int8WeightOnlyConfig",
    ),
    (MARLIN | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
    (MARLIN | {"transform_config": {"config_groups": {"R1": {}}}}, r"transform_config=\['R1'\]"),
    ({"quant_method": "gptq", "pack_dtype": "int8"}, "pack_dtype='int8'"),
    ({"quant_method": "aqlm"}, "asks for 'aqlm', which is not supported; supported: auto-round, awq, bitsandbytes"),
    ({"quant_method": "int4"}, "'int4', which is only made of plain checkpoints"),
    (MARLIN, "format='marlin-24'.*pack-quantized"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"config_groups=\[\]"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), REFUSED)
def test_what_is_not_supported_is_refused_with_what_is(section, message):
    with pytest.raises(ConfigError, match=message) as caught:
        linear_method(None, HFConfig({"quantization_config": section}))
    assert caught.value.setting == "quantization"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.scales"), r"Missing \(1\): model\.layers\.0\.mlp\.up_proj\.scales"),
        (lambda t: t.update({f"{UP}.scales": torch.ones(3, 96)}), r"up_proj.scales is \[3, 96\].* \[2, 96\]"),
        (lambda t: t.update({f"{UP}.qweight": torch.ones(8, 96)}), "up_proj.qweight is F32, not I32.*'gptq'"),
        (lambda t: t.update({f"{UP}.bias": torch.ones(96)}), r"up_proj: it has a bias, which this"),
    ],
)
def test_a_damaged_checkpoint_is_named(cpu, llama, tmp_path, change, message):
    store(llama, tmp_path, WEIGHT_ONLY["gptq 4 bits"])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(cpu, tmp_path)


def test_zero_biases_that_a_tool_added_are_passed_over(cpu, llama, tmp_path):
    store(llama, tmp_path, WEIGHT_ONLY["gptq 4 bits"])
    expected = logprobs_of(load(cpu, tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    codes = {name: tensor for name, tensor in tensors.items() if name.endswith("qweight")}
    tensors |= {re.sub("qweight$", "bias", name): torch.zeros(tensor.shape[1]) for name, tensor in codes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logprobs_of(load(cpu, tmp_path)), expected)


@pytest.mark.parametrize("name", ["gptq 4 bits", "compressed 4 bits"])
def test_the_head_may_be_stored_so_too(cpu, llama, tmp_path, name):
    form = WEIGHT_ONLY[name]
    section = form.section | ({"lm_head": True} if name.startswith("gptq") else {"ignore": []})
    worth = store(llama, tmp_path, quantized_models.Format(section, form.write), head=True)
    assert not torch.equal(worth["lm_head.weight"], load_file(llama / "model.safetensors")["lm_head.weight"])
    loaded = load(cpu, tmp_path)
    assert isinstance(loaded.model._weights["lm_head"], PackedWeight)
    torch.testing.assert_close(logprobs_of(loaded), logprobs_of(load(cpu, tmp_path / "worth")), rtol=0, atol=1e-3)
    assert describe(cpu, tmp_path)["weight_bytes"] < describe(cpu, tmp_path / "worth")["weight_bytes"] - 384 * 64 * 3


class RunsAhead(CpuPlatform):
    """As the CPU, said to work beside the host: nobody can ask what a router chose."""

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), async_output=Explained(True, "a test's own platform"))


@pytest.mark.parametrize("name", ["gptq 4 bits", "awq", "compressed nvfp4", "bitsandbytes nf4", "fp8 small blocks"])
def test_experts_stay_small_where_the_host_may_look_at_the_router(cpu, tmp_path, name, caplog):
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path / "plain", num_experts=4, moe_intermediate_size=64)
    store(path, tmp_path / "stored", (WEIGHT_ONLY | FLOAT8)[name])
    expected, plain_bytes = logprobs_of(load(cpu, tmp_path / "stored/worth")), describe(cpu, tmp_path / "stored/worth")
    ahead = RunsAhead()
    ahead.select_kernels(deterministic=True)
    for platform in (cpu, ahead):
        caplog.clear()
        with caplog.at_level("WARNING", logger="quire"):
            loaded = load(platform, tmp_path / "stored")
        torch.testing.assert_close(logprobs_of(loaded), expected, rtol=0, atol=1e-3)
        is_small = platform is cpu and "fp8" not in name
        assert (loaded.model._layers[0].mlp.mixture._experts._listed is not None) == is_small
        assert ("36 matrices of experts or embeddings were made plain" in caplog.text) == (
            not is_small and "fp8" not in name
        )
        ratio = loaded.explain()["model"]["weight_bytes"] / plain_bytes["weight_bytes"]
        assert (ratio < 0.75) == is_small


@pytest.mark.parametrize("plain", ["down_proj", "up_proj"])
def test_experts_that_are_stored_in_part_are_used_so(cpu, tmp_path, plain):
    """One of the two matrices in a plain type; or a half of the first, which makes all of it plain."""
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path / "plain", num_experts=4, moe_intermediate_size=64)
    store(path, tmp_path / "stored", WEIGHT_ONLY["gptq 4 bits, act order"], plain=plain)
    expected = logprobs_of(load(cpu, tmp_path / "stored/worth"))
    loaded = load(cpu, tmp_path / "stored")
    torch.testing.assert_close(logprobs_of(loaded), expected, rtol=0, atol=1e-3)
    experts = loaded.model._layers[0].mlp.mixture._experts._listed
    kinds = {"gate_up": type(experts.gate_up[0][0]).__name__, "down": type(experts.down[0]).__name__}
    assert kinds[{"down_proj": "down", "up_proj": "gate_up"}[plain]] == "LinearWeight"
    assert "PackedWeight" in kinds.values()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_plain_mixtures_experts_are_rounded_one_by_one(cpu, tmp_path, kind, caplog):
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path, num_experts=4, moe_intermediate_size=64)
    plain = load(cpu, path)
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(cpu, path, quantization=kind)
    assert "Experts stay" not in caplog.text
    experts = loaded.model._layers[0].mlp.mixture._experts._listed
    assert {type(weight) for weights in (*experts.gate_up, experts.down) for weight in weights} == {PackedWeight}
    assert (sum(weight.out_features for weight in experts.gate_up[0]), len(experts.gate_up)) == (128, 4)
    moved = (logprobs_of(loaded) - logprobs_of(plain)).abs().mean()
    assert 1e-4 < moved < (0.1 if kind == "int8" else 1.0)
    ratio = loaded.explain()["model"]["weight_bytes"] / plain.explain()["model"]["weight_bytes"]
    assert ratio < (0.6 if kind == "int8" else 0.5)


def test_the_engine_generates_with_small_experts(tmp_path):
    """Steps of such mixtures are not recorded; several requests at once choose several experts."""
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path / "plain", num_experts=4, moe_intermediate_size=64)
    store(path, tmp_path / "stored", WEIGHT_ONLY["compressed 4 bits"])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": TOKENS[start:]} for start in range(5)]
    stored, worth = (
        [
            list(o.outputs[0].token_ids)
            for o in LLM(str(p), dtype="float32", deterministic=True).generate(prompts, params)
        ]
        for p in (tmp_path / "stored", tmp_path / "stored/worth")
    )
    assert stored == worth


def test_gpt_oss_experts_are_read_from_blocks(cpu, tmp_path):
    path = make_tiny_model(
        "GptOssForCausalLM", tmp_path / "plain", head_dim=16, num_local_experts=3, num_experts_per_tok=2,
        intermediate_size=32, sliding_window=8, dtype="float32",
    )  # fmt: skip
    quantized_models.store_mxfp4_experts(path, tmp_path / "stored")
    expected = logprobs_of(load(cpu, tmp_path / "stored/worth"))
    ahead = RunsAhead()
    ahead.select_kernels(deterministic=True)
    for platform in (cpu, ahead):
        loaded = load(platform, tmp_path / "stored")
        torch.testing.assert_close(logprobs_of(loaded), expected, rtol=0, atol=1e-3)
        assert (loaded.model._layers[0].mlp.mixture._experts._listed is not None) == (platform is cpu)
    assert (logprobs_of(load(cpu, path)) - expected).abs().max() > 0.01


def test_transformers_modules_do_not_read_formats(cpu, llama, tmp_path):
    store(llama, tmp_path, WEIGHT_ONLY["awq"])
    with pytest.raises(ConfigError, match=r"stored as 'awq', which TransformersModel.* cannot read"):
        load(cpu, tmp_path, model_impl="transformers")


def test_a_description_may_stand_in_a_file_of_its_own(cpu, llama, tmp_path):
    """As the first checkpoints of modelopt, AutoGPTQ and AutoAWQ have it; or under compressed-tensors' first name."""
    store(llama, tmp_path / "a", WEIGHT_ONLY["modelopt nvfp4"])
    store(llama, tmp_path / "b", WEIGHT_ONLY["compressed 4 bits"])
    store(llama, tmp_path / "c", WEIGHT_ONLY["gptq 4 bits"])
    store(llama, tmp_path / "d", WEIGHT_ONLY["awq"])
    for folder in ("a", "b", "c", "d"):
        expected = logprobs_of(load(cpu, tmp_path / folder))
        path = tmp_path / folder / "config.json"
        config = json.loads(path.read_text())
        section = config.pop("quantization_config")
        if folder == "a":
            beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
            (path.parent / "hf_quant_config.json").write_text(json.dumps(beside))
        elif folder == "c":
            (path.parent / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "desc_act": false}')
        elif folder == "d":
            beside = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
            (path.parent / "quant_config.json").write_text(json.dumps(beside))
        else:
            config["compression_config"] = section
        path.write_text(json.dumps(config))
        assert torch.equal(logprobs_of(load(cpu, tmp_path / folder)), expected)


class CopiesBeside(UploadStream):
    """A device's copies, done when they are asked for."""

    def staging(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fence(self):
        pass

    def submit(self, target, source):
        target.copy_(source)
        return mock.Mock()

    def join(self, event):
        pass


@pytest.mark.parametrize(
    "name", ["gptq 4 bits, act order", "awq", "bitsandbytes nf4, nested", "modelopt nvfp4", "fp8 small blocks"]
)
def test_what_a_device_is_sent_is_the_same(cpu, llama, tmp_path, name, monkeypatch):
    """Stretches of rows go through buffers: also of tensors that have no rows, or fewer."""
    store(llama, tmp_path, (WEIGHT_ONLY | FLOAT8)[name])
    expected = logprobs_of(load(cpu, tmp_path))
    monkeypatch.setattr(CpuPlatform, "upload_stream", lambda self, device: CopiesBeside())
    assert torch.equal(logprobs_of(load(cpu, tmp_path)), expected)


def test_scales_may_have_a_type_of_their_own(cpu, llama, tmp_path):
    """Powers of two as float8_e8m0fnu rather than as bytes."""
    store(llama, tmp_path, WEIGHT_ONLY["compressed mxfp4"])
    expected = logprobs_of(load(cpu, tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        n: t.view(torch.float8_e8m0fnu) if t.dtype == torch.uint8 and n.endswith("scale") else t
        for n, t in tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logprobs_of(load(cpu, tmp_path)), expected)
