"""Checkpoints in the less common layouts: they give what their values in a plain checkpoint give, on a CPU and by GPU kernels."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.interpreter import repair_interpreter
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.quantized_models import FLOAT8, WEIGHT_ONLY, store
from tests.oracles.quantized_variants import VARIANTS, VARIANTS_FLOAT8, VARIANTS_ROUNDING
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.kernels import ops, triton
from quire.kernels.types import Int8Weight, PackedWeight
from quire.model_loader import load_model
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Explained

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cpu():
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)  # inputs as they are: the faster kernels round them to int8
    return platform


def load(platform, path, dtype="float32", **settings):
    config = EngineArgs(model=str(path), dtype=dtype, **settings).create_engine_config()
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def logprobs_of(loaded):
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(TOKENS), row=0))


PLAIN = ("hqq 4 bits, axis 0", "modelopt w4a16 awq", "compressed, three groups")
"""Formats in which some of gate and up are multiplied as plain matrices."""
PLAIN_DOWN = (*PLAIN[:2], "bitsandbytes", "over the ends of rows", "ragged groups, act order")
"""Formats in which no kernel takes a matrix of 96 columns as it is stored."""
FEW = (
    "gptq 3 bits", "gptq 4 bits, ragged groups", "awq gemv", "auto-round mixed bits", "hqq 4 bits", "quark int4",
    "modelopt w4a16 awq", "compressed int8, asymmetric", "compressed, three groups", "torchao by name", "modelopt mixed",
)  # fmt: skip


def exhaustive_but(few, names):
    return [pytest.param(name, marks=() if name in few else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", exhaustive_but(FEW, VARIANTS | VARIANTS_FLOAT8))
def test_a_checkpoint_is_worth_its_values_and_stays_small(cpu, llama, tmp_path, name):
    store(llama, tmp_path, (VARIANTS | VARIANTS_FLOAT8)[name])
    loaded = load(cpu, tmp_path)
    actual, expected = logprobs_of(loaded), logprobs_of(load(cpu, tmp_path / "worth"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
    if name in VARIANTS:
        linears = loaded.model._layers[1].mlp.linears
        assert isinstance(linears["gate_up"], PackedWeight) == (name not in PLAIN)
        assert isinstance(linears["down"], PackedWeight) == (not any(part in name for part in PLAIN_DOWN))


@pytest.mark.parametrize("name", VARIANTS_ROUNDING)
def test_int8_activations_move_logprobs_a_little(cpu, llama, tmp_path, name):
    store(llama, tmp_path, VARIANTS_ROUNDING[name])
    loaded = load(cpu, tmp_path)
    expected = logprobs_of(load(cpu, tmp_path / "worth"))
    assert isinstance(loaded.model._layers[0].mixers[0].linears["qkv"], Int8Weight)
    assert 1e-4 < (logprobs_of(loaded) - expected).abs().mean() < 0.2


class Interpreted(CpuPlatform):
    """The GPU's kernels on the CPU, by Triton's interpreter; or their references."""

    def __init__(self, kernels="cuda"):
        self.kernels = kernels

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), fp8=Explained(True, "a test's own platform"))

    def select_kernels(self, *, deterministic=False):
        if self.kernels == "cuda":
            repair_interpreter()
            triton.register()
        ops.select(self.kernels, deterministic=deterministic)

    def attention_backends(self):
        return ["quire.attention.reference:ReferenceBackend"]


GPU_FORMATS = WEIGHT_ONLY | VARIANTS


@pytest.mark.parametrize(
    "name", exhaustive_but(("gptq 3 bits", "compressed int8, asymmetric", "hqq 4 bits"), GPU_FORMATS)
)
def test_gpu_kernels_give_a_checkpoint_its_worth(llama, tmp_path, name):
    store(llama, tmp_path, GPU_FORMATS[name])
    gpu = Interpreted()
    gpu.select_kernels()
    actual, expected = (logprobs_of(load(gpu, path, "float16")) for path in (tmp_path, tmp_path / "worth"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FLOAT8 | VARIANTS_FLOAT8)
def test_gpu_kernels_multiply_float8(tmp_path, name):
    """As the references do, which round activations to float8 where the format says so. One layer: in a second one some
    would be rounded the other way for what the first one lost."""
    plain = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", num_hidden_layers=1)
    store(plain, tmp_path, (FLOAT8 | VARIANTS_FLOAT8)[name])
    found = []
    for kernels in ("cuda", "reference"):
        platform = Interpreted(kernels)
        platform.select_kernels()
        found.append(logprobs_of(load(platform, tmp_path, "float16")))
    actual, expected = found
    assert (actual - expected).abs().mean() < 0.05


def test_matrices_in_one_tensor_are_read_from_other_packings(cpu, tmp_path):
    """Phi3 stores queries, keys and values together, and both halves of the gated product."""
    path = make_tiny_model("Phi3ForCausalLM", tmp_path / "plain")
    for name in ("gptq 3 bits", "quark int4", "hqq 4 bits"):
        store(path, tmp_path / name, VARIANTS[name])
        actual, expected = (logprobs_of(load(cpu, each)) for each in (tmp_path / name, tmp_path / name / "worth"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_a_tied_head_is_read_beside_stored_matrices(cpu, tmp_path):
    path = make_tiny_model("Qwen3ForCausalLM", tmp_path / "plain", tie_word_embeddings=True)
    for name in ("quark uint4, in order", "hqq 2 bits"):
        store(path, tmp_path / name, VARIANTS[name])
        actual, expected = (logprobs_of(load(cpu, each)) for each in (tmp_path / name, tmp_path / name / "worth"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_auto_round_may_store_the_head(cpu, llama, tmp_path):
    form = VARIANTS["auto-round gptq"]
    form = dataclasses.replace(
        form, section=form.section | {"extra_config": {"lm_head": {"bits": 4, "group_size": 32}}}
    )
    store(llama, tmp_path, form, head=True)
    loaded = load(cpu, tmp_path)
    assert isinstance(loaded.model._weights["lm_head"], PackedWeight)
    torch.testing.assert_close(logprobs_of(loaded), logprobs_of(load(cpu, tmp_path / "worth")), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["intel/auto-round", "inc"])
def test_auto_round_has_several_names(cpu, llama, tmp_path, name):
    form = VARIANTS["auto-round gptq"]
    store(llama, tmp_path, dataclasses.replace(form, section=form.section | {"quant_method": name}))
    assert load(cpu, tmp_path, quantization="inc").explain()["model"]["quantization"] == "auto-round"


def test_scales_of_a_cache_alone_leave_matrices_plain(cpu, llama, tmp_path):
    store(llama, tmp_path, VARIANTS["compressed 3 bits"], plain=".")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}_scale": torch.tensor([0.5]) for name in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logprobs_of(load(cpu, tmp_path)), logprobs_of(load(cpu, llama)))
