"""From a configuration to a model: what loads, what is refused, and what the refusal says."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import ops
from quire.model_loader import load_model
from quire.model_loader.dummy import dummy_weights
from quire.platforms.cpu import CpuPlatform

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama, tmp_path):
    """A checkpoint to spoil: (folder, function that rewrites its tensors)."""
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def rewrite(change):
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")

    return tmp_path, rewrite


def load(path, **settings):
    platform = CpuPlatform()
    platform.select_kernels()
    config = EngineArgs(model=str(path), **settings).create_engine_config()
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def logprobs_of(loaded, token_ids=TOKENS):
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(token_ids), row=0))


def oracle(path, token_ids=TOKENS):
    with torch.no_grad():
        return load_oracle(path)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def assert_parity(path, **settings):
    torch.testing.assert_close(logprobs_of(load(path, **settings)), oracle(path), rtol=0, atol=1e-3)


def test_a_folder_loads_and_says_what_was_chosen(llama):
    loaded = load(llama)
    torch.testing.assert_close(logprobs_of(loaded), oracle(llama), rtol=0, atol=1e-3)
    report = loaded.explain()
    parameters = sum(tensor.numel() for tensor in load_file(llama / "model.safetensors").values())
    assert report["model"]["parameters"] == parameters
    assert report["model"]["weight_bytes"] == 4 * parameters
    assert report["model"]["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert report["reasons"][loaded.backend.name].startswith("chosen")


def test_a_sharded_checkpoint_loads(tmp_path):
    path = make_tiny_model("Qwen2ForCausalLM", tmp_path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_parity(path)


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model."])
def test_a_checkpoint_may_have_another_prefix(copy, prefix):
    path, rewrite = copy
    expected = oracle(path)

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    rewrite(rename)
    if prefix.startswith("language"):
        with pytest.raises(ConfigError, match=r"Missing.*Unexpected .*language_model\.model\."):
            load(path)
        return
    torch.testing.assert_close(logprobs_of(load(path)), expected, rtol=0, atol=1e-3)


def test_gpt2_loads_from_names_without_prefix_and_with_masks(tmp_path):
    path = make_tiny_model("GPT2LMHeadModel", tmp_path)
    expected = oracle(path)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, path / "model.safetensors")
    torch.testing.assert_close(logprobs_of(load(path)), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_converted_to_the_type_that_was_asked(llama, dtype, tmp_path):
    loaded = load(llama, dtype=dtype)
    assert loaded.model.describe()["dtype"] == dtype
    rounded = load_file(llama / "model.safetensors")
    rounded = {name: t.to(getattr(torch, dtype)).float() if t.dim() == 2 else t for name, t in rounded.items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert (logprobs_of(loaded) - oracle(tmp_path)).abs().mean() < 0.05


def test_a_16_bit_checkpoint_may_run_in_float32(tmp_path):
    path = make_tiny_model("LlamaForCausalLM", tmp_path, dtype="bfloat16")
    torch.testing.assert_close(logprobs_of(load(path, dtype="float32")), oracle(path), rtol=0, atol=1e-3)


def test_missing_and_unexpected_names_are_refused_before_reading(copy):
    path, rewrite = copy

    def spoil(tensors):
        tensors["model.surplus.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")

    rewrite(spoil)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "Missing (1): model.layers.1.self_attn.k_proj.weight" in str(caught.value)
    assert "Unexpected (1): model.surplus.weight" in str(caught.value)
    assert caught.value.setting == "model"


def test_a_wrong_shape_is_refused_with_both_shapes(copy):
    path, rewrite = copy
    rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \[63\], config\.json asks for \[64\]"):
        load(path)


def test_one_weight_under_two_names_is_refused(copy):
    path, rewrite = copy
    rewrite(lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(ConfigError, match=r"norm\.weight \(in model.safetensors\), which are the same weight: remove"):
        load(path)


def test_a_config_of_another_size_is_refused(llama):
    with pytest.raises(ConfigError, match=r"wrong weight shapes \(\d+\): .*config\.json asks for \[\d+, 96\]"):
        load(llama, hf_overrides={"intermediate_size": 96, "hidden_size": 96, "head_dim": 24})


def test_integers_are_not_taken_for_weights(copy):
    path, rewrite = copy
    rewrite(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"another type than they should: model\.norm\.weight is I8"):
        load(path)


def test_a_quantized_checkpoint_is_refused_by_name(copy):
    path, _ = copy
    values = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "strange8"}}))
    with pytest.raises(ConfigError, match=r"asks for 'strange8', which is not supported; supported: .*unquantized"):
        load(path)


def test_an_unknown_architecture_is_refused(llama):
    with pytest.raises(ConfigError, match="'LlamaForCausalLN' has no spec; nearest: LlamaForCausalLM"):
        load(llama, hf_overrides={"architectures": ["LlamaForCausalLN"]})


def test_a_config_without_a_needed_field_is_refused(copy):
    path, _ = copy
    values = json.loads((path / "config.json").read_bytes())
    del values["num_attention_heads"]
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"does not fit LlamaForCausalLM: config\.json has no 'num_attention_heads'"):
        load(path)


@pytest.mark.parametrize(("free_bytes", "setting"), [(500_000, "model"), (700_000, "max_num_batched_tokens")])
def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_looked_for(llama, tmp_path, free_bytes, setting):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    platform = CpuPlatform()
    platform.select_kernels()
    with pytest.raises(ConfigError, match=r"needs 0\.00 GiB for its weights \(0 M parameters as float32\)") as caught:
        load_model(config, platform, torch.device("cpu"), 256, 16, free_bytes=free_bytes)
    assert caught.value.setting == setting


def test_an_unknown_load_format_is_refused(llama):
    config = EngineArgs(model=str(llama)).create_engine_config()
    config = dataclasses.replace(config, load=dataclasses.replace(config.load, load_format="tarball"))
    platform = CpuPlatform()
    platform.select_kernels()
    with pytest.raises(
        ConfigError,
        match="load_format='tarball' is not known; allowed: auto, bitsandbytes, hf, mistral, pt, safetensors",
    ):
        load_model(config, platform, torch.device("cpu"), 64, 16)


def test_an_unknown_attention_backend_is_refused_with_the_names(llama):
    with pytest.raises(ConfigError, match=r"attention_backend='zeta' is not known.*cpu, reference"):
        load(llama, attention_backend="zeta")


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "Qwen3ForCausalLM"]
)
def test_dummy_weights_make_logits_that_are_neither_nan_nor_certain(architecture, tmp_path):
    path = make_tiny_model(architecture, tmp_path)
    (path / "model.safetensors").unlink()
    logprobs = logprobs_of(load(path, load_format="dummy"))
    assert torch.isfinite(logprobs).all()
    assert 0.02 < logprobs.exp().amax(-1).mean() < 0.8
    assert logprobs.argmax(-1).unique().numel() > 3


def test_dummy_weights_depend_on_the_seed_alone(llama):
    first, again, other = (logprobs_of(load(llama, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)


def test_no_two_rows_of_a_dummy_embedding_are_equal(llama):
    model = load(llama).model
    for name, tensor in dummy_weights(model.sources.values(), model.spec, 0, torch.float32):
        if tensor.dim() == 2:
            assert tensor.unique(dim=0).shape[0] == tensor.shape[0], name


def test_windows_can_be_turned_off(tmp_path):
    path = make_tiny_model("MistralForCausalLM", tmp_path, sliding_window=40)
    kinds = [
        {str(s.kind) for s in load(path, **s).model.kv_cache_specs()} for s in ({}, {"disable_sliding_window": True})
    ]
    assert kinds == [{"sliding_window"}, {"full"}]


def test_packed_weights_are_not_needed_in_their_own_layout(llama):
    """Native kernels may drop it; whatever was chosen, nothing here may read `LinearWeight.data`."""
    loaded = load(llama)
    for layer in loaded.model._layers:
        for weight in layer.linears.values():
            if weight.packed is not None:
                weight.data = None
    torch.testing.assert_close(logprobs_of(loaded), oracle(llama), rtol=0, atol=1e-3)
    assert ops.choices()["linear"].chosen is not None


def test_a_device_gets_the_same_dummy_weights_and_no_two_share_memory(llama):
    model = load(llama, load_format="dummy").model
    sources = model.sources.values()
    on_host = dict(dummy_weights(sources, model.spec, 3, torch.bfloat16))
    # To torch this is another device than plain "cpu", so it goes the way of one.
    on_device = dict(dummy_weights(sources, model.spec, 3, torch.bfloat16, torch.device("cpu", 0)))
    assert list(on_host) == list(on_device)
    places = set()
    for name, source in model.sources.items():
        whole = tuple(slice(0, size) for size in source.shape)
        assert torch.equal(on_host[name][whole], on_device[name][whole]), name
        if len(source.module.sources) == 1 and len(source.shape) > 1:
            places.add(on_device[name][whole].untyped_storage().data_ptr())
            places.add(on_device[name][whole].untyped_storage().data_ptr())
    assert places.isdisjoint({tensor.untyped_storage().data_ptr() for tensor in on_host.values()})
