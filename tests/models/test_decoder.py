"""What the decoder promises beyond parity: pages, buffers, errors, and the parts of the spec that no tested checkpoint uses."""

import dataclasses
import json

import pytest
import torch
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny

from quire.attention.reference import ReferenceBackend
from quire.config import HFConfig
from quire.config.kv_spec import KVKind, group_layers
from quire.errors import ConfigError
from quire.layers.decoder import Decoder
from quire.layers.interface import ModelContext
from quire.model_loader.dummy import dummy_weights
from quire.models.registry import ModelRegistry
from quire.models.residual import PARALLEL, PARALLEL_TWO_NORMS
from quire.models.spec import DecoderSpec

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


def spec_of(path) -> DecoderSpec:
    hf = HFConfig(json.loads((path / "config.json").read_bytes()))
    return ModelRegistry.resolve(hf.architectures).make_spec(hf)


def build(spec: DecoderSpec, **settings) -> Decoder:
    types = dict.fromkeys(("dtype", "kv_dtype", "activation_dtype"), settings.pop("dtype", torch.float32))
    defaults = types | {"block_size": 16, "max_tokens": 64, "max_logits": 16}
    return Decoder(spec, ModelContext(backend=ReferenceBackend(), **(defaults | settings)))


def logprobs_of(model: Decoder) -> torch.Tensor:
    return ModelDriver(model).prefill(Sequence(list(TOKENS), row=0))


def test_layers_with_windows_form_a_group_of_their_own(reference_kernels, tiny):
    specs = build(spec_of(tiny("Gemma3ForCausalLM")), kv_dtype=torch.bfloat16, block_size=8).kv_cache_specs()
    assert [spec.kind for spec in specs] == [KVKind.SLIDING_WINDOW, KVKind.FULL, KVKind.SLIDING_WINDOW]
    assert [spec.window for spec in specs] == [8, 0, 8]
    assert specs[0] == specs[2]
    assert not any({0, 1} <= set(group.layers) for group in group_layers(specs))
    assert specs[0].page_bytes == 8 * 2 * 2 * 16 * 2
    assert specs[0].dtype == "bfloat16"


def test_a_steps_results_always_lie_at_the_same_addresses(kernels, tiny):
    """A recorded step is replayed by address, with any number of tokens."""
    driver = ModelDriver(build_tiny(tiny("LlamaForCausalLM")))
    addresses = set()
    for count in (1, 7, 40):
        driver.step([(Sequence(list(range(4, 4 + count)), row=0), count)])
        model, inputs = driver.model, driver.step_inputs
        addresses.add((model.forward(inputs).data_ptr(), model.compute_logits(inputs).data_ptr()))
    assert len(addresses) == 1


def test_logits_are_float32_rows_of_what_was_asked_for(kernels, tiny):
    driver = ModelDriver(build_tiny(tiny("LlamaForCausalLM"), dtype="bfloat16"))
    driver.step([(Sequence(list(TOKENS), row=0), len(TOKENS))])
    driver.step_inputs.num_logits = 3
    logits = driver.model.compute_logits(driver.step_inputs)
    assert logits.shape == (3, 384)
    assert logits.dtype == torch.float32


def test_weights_that_stream_in_are_checked_by_name(reference_kernels, tiny):
    model = build(spec_of(tiny("LlamaForCausalLM")))
    weights = dict(dummy_weights(model.sources.values(), model.spec, 0, torch.float32))
    weights["model.extra"] = weights.pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"Missing \(1\): model\.norm\.weight\. Unexpected \(1\): model\.extra"):
        model.load_weights(weights.items())


def test_a_context_beyond_the_table_of_positions_is_refused(tiny):
    with pytest.raises(ConfigError, match="max_model_len=257, but the model has a table of only 256 positions"):
        build(spec_of(tiny("GPT2LMHeadModel")), max_positions=257)


def test_an_unknown_activation_is_refused_with_the_known_ones(tiny):
    spec = spec_of(tiny("LlamaForCausalLM"))
    spec = dataclasses.replace(spec, mlp=dataclasses.replace(spec.mlp, act="sine"))
    with pytest.raises(ConfigError, match=r"activation 'sine' of config\.json is not known; known: silu"):
        build(spec)


def test_a_spec_with_the_wrong_number_of_layers_is_a_mistake(tiny):
    spec = spec_of(tiny("Gemma3ForCausalLM"))
    with pytest.raises(ValueError, match="mixer has 3 entries for 4 layers"):
        build(dataclasses.replace(spec, layers=4))


def test_a_sink_takes_its_share_of_the_softmax(kernels, tiny):
    """A sink that weighs nothing changes nothing; one that weighs all leaves attention with nothing to add."""
    plain = spec_of(tiny("LlamaForCausalLM"))
    names = plain.weights.but(sinks="self_attn.sinks")
    spec = dataclasses.replace(
        plain, weights=names, mixer=tuple(dataclasses.replace(mixer, sinks=True) for mixer in plain.attentions())
    )

    def run(spec: DecoderSpec, sink: float, out_scale: float = 1.0) -> torch.Tensor:
        model = build(spec)
        weights = dict(dummy_weights(model.sources.values(), spec, 0, torch.float32))
        for name in weights:
            if name.endswith("sinks"):
                weights[name] = torch.full_like(weights[name], sink)
            if name.endswith("o_proj.weight"):
                weights[name] = weights[name] * out_scale
        model.load_weights(weights.items())
        return logprobs_of(model)

    without = run(plain, 0.0)
    torch.testing.assert_close(run(spec, -60.0), without, rtol=0, atol=1e-4)
    torch.testing.assert_close(run(spec, 60.0), run(plain, 0.0, out_scale=0.0), rtol=0, atol=1e-4)
    assert (run(spec, 1.0) - without).abs().max() > 0.01


def test_parallel_halves_with_two_equal_norms_are_those_with_one(kernels, tiny):
    one = spec_of(tiny("CohereForCausalLM"))
    assert one.placement == PARALLEL
    two = dataclasses.replace(one, placement=PARALLEL_TWO_NORMS, weights=one.weights.but(before_mlp="second_norm"))
    results = []
    for spec in (one, two):
        model = build(spec)
        weights = dict(dummy_weights(model.sources.values(), spec, 0, torch.float32))
        for name in weights:
            if "second_norm" in name:
                weights[name] = weights[name.replace("second_norm", "input_layernorm")]
        model.load_weights(weights.items())
        results.append(logprobs_of(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_the_description_counts_what_there_is(reference_kernels, tiny):
    description = build_tiny(tiny("GPT2LMHeadModel"), dtype="bfloat16").describe()
    matrices = 384 * 64 + 256 * 64 + 3 * (4 * 64 * 64 + 8 * 64 * 64)
    vectors = 3 * (4 * 64 + (3 * 64 + 64 + 4 * 64 + 64)) + 2 * 64
    assert description["parameters"] == matrices + vectors
    assert description["weight_bytes"] == 2 * matrices + 4 * vectors
    assert description["kv_bytes_per_token"] == 3 * 2 * 64 * 2
    assert description["workspace_bytes"] > 0
