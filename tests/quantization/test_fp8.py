"""Float8 matrices from plain and from stored checkpoints, through whole models; what is refused, and why."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.tiny_models import make_tiny_model

from quire.config import HFConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import fp8 as kernels
from quire.kernels import ops
from quire.kernels.fp8 import FP8_MAX, dequantize
from quire.kernels.types import FP8, Fp8Weight
from quire.layers.assembly import Assembler
from quire.layers.decoder_layer import modules_of
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import sources_of
from quire.model_loader import load_model
from quire.models.registry import ModelRegistry
from quire.platforms.cpu import CpuPlatform
from quire.quantization import compressed, fp8
from quire.quantization.method import QuantizedLinear
from quire.quantization.registry import linear_method

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]
SMALLEST_STEP = 2.0**-9
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def load(platform, path, **settings):
    config = EngineArgs(model=str(path), **settings).create_engine_config()
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def logprobs_of(loaded, token_ids=TOKENS):
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(token_ids), row=0))


def is_matrix(name):
    return name.endswith("proj.weight")


def store(source, target, section, *, by_channel=False, static=False, plain=(), dtype=torch.float32):
    """Write a checkpoint with float8 matrices beside `source`; returns what its matrices are worth."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": section}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    worth = dict(tensors)
    for name in [name for name in tensors if is_matrix(name) and not any(part in name for part in plain)]:
        values = tensors[name]
        largest = values.abs().amax(1, keepdim=True) if by_channel else values.abs().amax()
        scale = (largest / FP8_MAX).to(dtype)
        tensors[name] = (values / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        worth[name] = tensors[name].float() * scale.float()
        tensors[name + "_scale"] = scale
        if static:
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.05)
    save_file(tensors, target / "model.safetensors")
    return worth


def with_weights(source, target, tensors):
    """A plain checkpoint with other weights."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def assert_close_to_plain(loaded, plain):
    """The same but for the rounding of activations, which moves logprobs a little."""
    expected = logprobs_of(plain)
    moved = (logprobs_of(loaded) - expected).abs().mean()
    assert 0.01 < moved < 0.3
    with mock.patch.object(kernels, "quantize", lambda x, scale: (x.float(), torch.ones(x.shape[0]))):
        torch.testing.assert_close(logprobs_of(loaded), expected, rtol=0, atol=1e-3)


def test_a_plain_checkpoint_is_rounded_when_it_is_loaded(float8_cpu, llama, tmp_path):
    loaded = load(float8_cpu, llama, quantization="fp8")
    tensors = load_file(llama / "model.safetensors")
    for name in filter(is_matrix, tensors):
        rounded, scale = kernels.quantize(tensors[name])
        tensors[name] = rounded.float() * scale[:, None]
    assert_close_to_plain(loaded, load(float8_cpu, with_weights(llama, tmp_path / "rounded", tensors)))


def test_rounding_moves_a_weight_by_no_more_than_half_a_step(float8_cpu, llama):
    loaded = load(float8_cpu, llama, quantization="fp8")
    stored = load_file(llama / "model.safetensors")
    weight = loaded.model._layers[1].mlp.linears["down"]
    values = stored["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(weight, Fp8Weight)
    error = (dequantize(weight) - values).abs()
    assert (error <= values.abs() * 2.0**-4 + weight.scale[:, None] * SMALLEST_STEP).all()
    torch.testing.assert_close(dequantize(weight).abs().amax(1), values.abs().amax(1), rtol=1e-6, atol=0)


def test_only_layers_matrices_are_rounded_and_their_bytes_are_counted(float8_cpu, llama):
    loaded = load(float8_cpu, llama, quantization="fp8")
    plain = load(float8_cpu, llama)
    model = loaded.model
    assert not isinstance(model._weights["embedding"], Fp8Weight)
    assert not isinstance(model._weights["lm_head"], Fp8Weight)
    assert all(isinstance(weight, Fp8Weight) for layer in model._layers for weight in layer.linears.values())
    tensors = load_file(llama / "model.safetensors")
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if is_matrix(name))
    channels = sum(tensor.shape[0] for name, tensor in tensors.items() if is_matrix(name))
    report, before = loaded.explain()["model"], plain.explain()["model"]
    assert report["quantization"] == "fp8"
    assert before["weight_bytes"] - report["weight_bytes"] == 3 * matrices - 4 * channels
    assert report["workspace_bytes"] - before["workspace_bytes"] == model.linear_method.scratch_bytes


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_checkpoint_is_worth_its_numbers_times_its_scales(float8_cpu, llama, tmp_path, by_channel, dtype):
    section = COMPRESSED if by_channel else {"quant_method": "fp8", "activation_scheme": "dynamic"}
    worth = store(llama, tmp_path / "stored", section, by_channel=by_channel, dtype=dtype)
    loaded = load(float8_cpu, tmp_path / "stored")
    weight = loaded.model._layers[2].mixers[0].linears["qkv"]
    parts = [worth[f"model.layers.2.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(dequantize(weight), torch.cat(parts))
    assert_close_to_plain(loaded, load(float8_cpu, with_weights(llama, tmp_path / "plain", worth)))


def test_parts_of_a_matrix_share_the_largest_of_their_input_scales(float8_cpu, llama, tmp_path):
    store(llama, tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, static=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor([0.125])
    save_file(tensors, tmp_path / "model.safetensors")
    layers = load(float8_cpu, tmp_path).model._layers
    assert layers[0].linears["qkv"].input_scale.tolist() == [0.125]
    assert layers[1].linears["qkv"].input_scale.tolist() == [pytest.approx(0.05)]


def test_matrices_that_the_checkpoint_left_plain_stay_plain(float8_cpu, llama, tmp_path):
    plain = ("mlp.down_proj", "layers.0.self_attn")
    section = {
        "quant_method": "fp8", "activation_scheme": "dynamic",
        "ignored_layers": ["lm_head", "re:.*down_proj", *(f"model.layers.0.self_attn.{p}_proj" for p in "qkvo")],
    }  # fmt: skip
    worth = store(llama, tmp_path / "stored", section, plain=plain)
    loaded = load(float8_cpu, tmp_path / "stored")
    kinds = [{name: isinstance(w, Fp8Weight) for name, w in layer.linears.items()} for layer in loaded.model._layers]
    assert kinds[0] == {"qkv": False, "out": False, "gate_up": True, "down": False}
    assert kinds[1] == {"qkv": True, "out": True, "gate_up": True, "down": False}
    assert_close_to_plain(loaded, load(float8_cpu, with_weights(llama, tmp_path / "plain", worth)))


def test_a_matrix_half_of_which_is_plain_is_made_plain(float8_cpu, llama, tmp_path, caplog):
    section = {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]}
    worth = store(llama, tmp_path / "stored", section, plain=("layers.0.self_attn.q_proj",))
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(float8_cpu, tmp_path / "stored")
    weight = loaded.model._layers[0].mixers[0].linears["qkv"]
    parts = [worth[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weight.data, torch.cat(parts))
    assert "3 matrices that are multiplied together were made plain" in caplog.text


def test_scales_of_a_cache_are_passed_over(float8_cpu, llama, tmp_path):
    store(llama, tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic"})
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logprobs_of(load(float8_cpu, tmp_path))
    tensors["model.layers.0.self_attn.attn.k_scale"] = torch.tensor(3.0)
    tensors["model.layers.0.self_attn.v_proj.v_scale"] = torch.tensor([3.0])
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logprobs_of(load(float8_cpu, tmp_path)), expected)


def test_plain_weights_under_a_float8_description_are_refused(float8_cpu, llama, tmp_path):
    store(llama, tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic"})
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 weights have another type .*up_proj.weight is BF16, not F8_E4M3.*'fp8'"):
        load(float8_cpu, tmp_path)


def test_a_missing_scale_is_named(float8_cpu, llama, tmp_path):
    store(llama, tmp_path, {"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(ConfigError, match=r"Missing \(21\): model\.layers\.0\.mlp\.down_proj\.input_scale"):
        load(float8_cpu, tmp_path)


def test_random_weights_stand_for_a_stored_checkpoint(float8_cpu, llama, tmp_path):
    store(llama, tmp_path, COMPRESSED, by_channel=True)
    assert logprobs_of(load(float8_cpu, tmp_path, load_format="dummy")).isfinite().all()


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_has_its_rows_scales(llama, tmp_path, size):
    worth = store(llama, tmp_path, COMPRESSED, by_channel=True)
    hf = HFConfig(json.loads((tmp_path / "config.json").read_bytes()))
    ops.select("any")
    spec = ModelRegistry.resolve(hf.architectures).make_spec(hf)
    modules, method = modules_of(spec), QuantizedLinear("fp8", compressed.parse(HFConfig(COMPRESSED)))
    name = "model.layers.0.mlp.down_proj.weight"
    for rank in range(size):
        plan = ParallelPlan(size, rank)
        sources = sources_of(modules, spec, plan, method)
        assembler = Assembler(sources, plan, torch.float32, torch.device("cpu"), method)
        finished = [assembler.add(name, tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()]
        weights = {module.name: weight for module, weight in filter(None, finished)}
        columns = worth[name].shape[1] // size
        assert torch.equal(dequantize(weights["layers.0.down"]), worth[name][:, rank * columns : (rank + 1) * columns])
        rows = worth["model.layers.0.mlp.gate_proj.weight"].shape[0] // size
        parts = [
            worth[f"model.layers.0.mlp.{part}_proj.weight"][rank * rows : (rank + 1) * rows] for part in ("gate", "up")
        ]
        assert torch.equal(dequantize(weights["layers.0.gate_up"]), torch.cat(parts))


def test_a_device_without_float8_says_so_before_anything_is_read(llama):
    platform = CpuPlatform()
    platform.select_kernels()
    why = platform.capabilities().fp8.why
    with pytest.raises(ConfigError, match="quantization='fp8' cannot run on this device") as caught:
        load(platform, llama, quantization="fp8")
    assert caught.value.setting == "quantization"
    assert why in str(caught.value)


def test_a_float8_cache_is_refused_where_the_device_has_no_float8(llama):
    platform = CpuPlatform()
    platform.select_kernels()
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' cannot run on this device") as caught:
        load(platform, llama, kv_cache_dtype="fp8")
    assert caught.value.setting == "kv_cache_dtype"


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_float8_cache_has_one_byte_a_value(float8_cpu, llama, name):
    loaded = load(float8_cpu, llama, kv_cache_dtype=name)
    report = loaded.explain()["model"]
    assert (report["kv_dtype"], report["kv_bytes_per_token"]) == ("float8_e4m3fn", 3 * 2 * 2 * 16)
    plain = load(float8_cpu, llama)
    moved = (logprobs_of(loaded) - logprobs_of(plain)).abs()
    assert 0 < moved.mean() < 0.15


def test_experts_stay_plain_and_stored_ones_are_made_plain(float8_cpu, tmp_path, caplog):
    path = make_tiny_model(
        "Qwen3MoeForCausalLM", tmp_path / "plain", head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    )  # fmt: skip
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(float8_cpu, path, quantization="fp8")
    assert "Experts stay in the model's own type" in caplog.text
    assert logprobs_of(loaded).isfinite().all()
    worth = store(path, tmp_path / "stored", {"quant_method": "fp8"})
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(float8_cpu, tmp_path / "stored")
    assert "36 matrices of experts or embeddings were made plain" in caplog.text
    experts = loaded.model._layers[1].mlp.mixture._experts.weights.down_EDI
    expected = [worth[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(4)]
    assert torch.equal(experts, torch.stack(expected))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size='\[128\] with"),
        (
            {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "two numbers, with activation_scheme dynamic",
        ),
        ({"activation_scheme": "sometimes"}, "activation_scheme='sometimes'"),
    ],
)
def test_other_float8_formats_are_refused(section, message):
    with pytest.raises(ConfigError, match=message) as caught:
        fp8.parse(HFConfig({"quant_method": "fp8"} | section))
    assert caught.value.setting == "quantization"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: group["weights"].update(num_bits=16), r"weights=\('float', 16\)"),
        (lambda group: group["weights"].update(strategy="block"), "weights.block_structure=None"),
        (lambda group: group["weights"].update(strategy="attn_head"), "weights.strategy='attn_head'"),
        (lambda group: group["input_activations"].update(dynamic=False), "input_activations.strategy='token'"),
    ],
)
def test_other_compressed_formats_are_refused(change, message):
    section = json.loads(json.dumps(COMPRESSED))
    change(section["config_groups"]["group_0"])
    with pytest.raises(ConfigError, match=message):
        compressed.parse(HFConfig(section))


def test_what_bitsandbytes_makes_of_plain_checkpoints_is_int4_here():
    assert linear_method("bitsandbytes", HFConfig({})).name == linear_method("int4", HFConfig({})).name == "int4"


def test_compressed_float8_needs_a_checkpoint_that_was_stored_so():
    with pytest.raises(
        ConfigError, match="for checkpoints that were stored so; a plain one can be loaded as fp8, int4, int8"
    ):
        linear_method("compressed-tensors", HFConfig({}))
