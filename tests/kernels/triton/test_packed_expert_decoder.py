"""Whole mixtures whose experts stay codes on a GPU's kernels: they compute what their values in a plain checkpoint give."""

import dataclasses

import pytest
import torch
from tests.oracles import quantized_models
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.quantized_models import FLOAT8, ROUNDING, WEIGHT_ONLY, store
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.kernels import ops, registry, triton
from quire.model_loader import load_model
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Explained

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]


class Interpreted(CpuPlatform):
    """Triton's kernels in its interpreter, on a device that works beside the host and knows float8."""

    def capabilities(self):
        why = "a test's own platform"
        return dataclasses.replace(
            super().capabilities(), async_output=Explained(True, why), fp8=Explained(True, why),
            activation_dtype=Explained("model", why),
        )  # fmt: skip

    def select_kernels(self, *, deterministic=False):
        triton.register()
        ops.select("cuda", deterministic=deterministic)


@pytest.fixture(autouse=True)
def platform(kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    platform = Interpreted()
    platform.select_kernels()
    return platform


def load(platform, path, dtype="float16", size=1, rank=0, whole=False, **settings):
    args = EngineArgs(model=str(path), dtype=dtype, skip_tokenizer_init=True, **settings)
    config = args.create_engine_config()
    parallel = dataclasses.replace(config.parallel, tensor_parallel_size=size, rank=rank, enable_expert_parallel=whole)
    config = dataclasses.replace(config, parallel=parallel)
    return load_model(config, platform, torch.device("cpu"), 64, 16)


def experts_of(loaded):
    return loaded.model._layers[0].mlp.mixture._experts.weights


def is_kept(loaded):
    experts = experts_of(loaded)
    return experts.gate_up_codes is not None and experts.down_codes is not None


def greedy(loaded, count=1):
    """(tokens, logprobs of the prompt)."""
    driver, sequence = ModelDriver(loaded.model, max_rows=1, pages_a_row=4), Sequence(list(TOKENS), row=0)
    (first,) = driver.step([(sequence, len(TOKENS))])
    logprobs = first
    for _ in range(count):
        sequence.token_ids.append(int(logprobs[-1].argmax()))
        (logprobs,) = driver.step([(sequence, 1)])
    return sequence.token_ids[len(TOKENS) :], first


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt-oss")
    make_tiny_model(
        "GptOssForCausalLM", folder / "plain", head_dim=16, num_local_experts=4, num_experts_per_tok=2, hidden_size=96,
        intermediate_size=64, num_hidden_layers=1, sliding_window=8, dtype="float32", tokenizer=False,
    )  # fmt: skip
    quantized_models.store_mxfp4_experts(folder / "plain", folder / "stored")
    return folder / "stored"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_tiny_model(
        "Qwen3MoeForCausalLM", tmp_path_factory.mktemp("qwen3"), num_experts=4, moe_intermediate_size=64,
        num_hidden_layers=1, tokenizer=False,
    )  # fmt: skip


def test_gpt_oss_keeps_its_blocks(platform, gpt_oss):
    loaded, plain = load(platform, gpt_oss), load(platform, gpt_oss / "worth")
    assert is_kept(loaded) and experts_of(plain).gate_up_codes is None
    assert loaded.model.linear_method.notes() == []  # nothing was made plain on the way
    (tokens, logprobs), (expected, expected_logprobs) = greedy(loaded), greedy(plain)
    assert tokens == expected
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-2)
    explained, plain_explained = (each.explain()["model"] for each in (loaded, plain))
    assert explained["matrices"]["experts: mxfp4"] == 2
    assert plain_explained["weight_bytes"] - explained["weight_bytes"] == 4 * 3 * 96 * 64 * (2 - 17 / 32)


@pytest.mark.parametrize("whole", [False, True])
def test_the_shares_of_two_ranks_add_up_to_the_whole(platform, gpt_oss, whole):
    x_TD, outs = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).half(), []
    for size, rank in ((1, 0), (2, 0), (2, 1)):
        model = load(platform, gpt_oss, size=size, rank=rank, whole=whole and size > 1).model
        outs.append(torch.empty_like(x_TD))
        model._layers[0].mlp.mixture.run(x_TD, outs[-1], torch.tensor([5]), model.workspace.tokens(5))
    torch.testing.assert_close(outs[1] + outs[2], outs[0], rtol=1e-2, atol=1e-3)


KEPT = ("compressed nvfp4", "bitsandbytes nf4", "compressed int8, channels", "fp8 small blocks")
ALSO_KEPT = ("gptq 4 bits", "awq", "compressed 4 bits", "compressed mxfp4", "compressed int8 weights", "fbgemm")


@pytest.mark.parametrize("name", [*KEPT, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ALSO_KEPT)])
def test_formats_whose_codes_fit_stay_codes(platform, mixture, tmp_path, name):
    store(mixture, tmp_path, (WEIGHT_ONLY | FLOAT8 | ROUNDING)[name])
    loaded, plain = load(platform, tmp_path), load(platform, tmp_path / "worth")
    assert is_kept(loaded) and loaded.model.linear_method.notes() == []
    x_TD, outs = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).half(), []
    for model in (loaded.model, plain.model):
        outs.append(torch.empty_like(x_TD))
        model._layers[0].mlp.mixture.run(x_TD, outs[-1], torch.tensor([5]), model.workspace.tokens(5))
    torch.testing.assert_close(*outs, rtol=1e-2, atol=2e-3)


@pytest.mark.exhaustive
def test_a_gptq_mixture_generates_what_its_values_do(platform, mixture, tmp_path):
    store(mixture, tmp_path, WEIGHT_ONLY["gptq 4 bits"])
    (tokens, logprobs), (expected, expected_logprobs) = (
        greedy(load(platform, path), 4) for path in (tmp_path, tmp_path / "worth")
    )
    assert tokens == expected
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gptq 4 bits, act order", "in groups of adjacent"), ("torchao int4", "whole numbers with whole zeros")],
)
def test_experts_whose_codes_do_not_fit_become_plain_and_say_why(platform, mixture, tmp_path, name, reason):
    store(mixture, tmp_path, WEIGHT_ONLY[name])
    loaded = load(platform, tmp_path)
    assert experts_of(loaded).gate_up_codes is None
    why = [name for name in loaded.explain()["model"]["matrices"] if name.startswith("experts: ")]
    assert len(why) == 1 and reason in why[0]


def test_experts_that_turn_out_not_to_fit_become_plain_one_by_one(platform, mixture, tmp_path, caplog):
    choices = ops.choices()
    unfit = dataclasses.replace(choices["pack_expert_codes"].chosen, function=lambda experts, is_gated: None)
    registry.use({**choices, "pack_expert_codes": registry.Choice(unfit, [])})
    store(mixture, tmp_path, WEIGHT_ONLY["gptq 4 bits"])
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(platform, tmp_path)
    assert "8 matrices of experts were made plain" in caplog.text
    assert experts_of(loaded).gate_up_E2ID.shape == (4, 128, 64)


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.exhaustive), "int4"])
def test_a_plain_mixtures_experts_are_rounded(platform, mixture, kind, caplog):
    with caplog.at_level("WARNING", logger="quire"):
        loaded = load(platform, mixture, quantization=kind)
    assert is_kept(loaded) and "Experts stay" not in caplog.text
    moved = (greedy(loaded, 0)[1] - greedy(load(platform, mixture), 0)[1]).abs().mean()
    assert 1e-4 < moved < (0.1 if kind == "int8" else 1.0)
