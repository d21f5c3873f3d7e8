"""Whole codes times one or two rows, with the activation, bias or residual after: the references' results."""

from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.test_packed_expert_decoder import load, platform  # noqa: F401 (a fixture)
from tests.kernels.triton.test_packed_tiles import DEVICE, make, permuted
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.operations import packed as reference
from tests.oracles.tiny_models import make_tiny_model

from quire.kernels import ops
from quire.kernels.triton.packed import matmul as module
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.triton.packed.vector import VectorConfig, launch_vector
from quire.layers.decoder import Decoder

CONFIGS = [VectorConfig(2, 4), pytest.param(VectorConfig(4, 8), marks=pytest.mark.exhaustive)]
EPS = 1e-6


def error_of(got, expected):
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def rows_of(count, k, spread=1.0):
    numbers = torch.Generator().manual_seed(count + k)
    x_TK = torch.randn(count, k, generator=numbers) * torch.randn(count, k, generator=numbers).mul(spread).exp()
    return x_TK.bfloat16().to(DEVICE)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("n", "k", "group", "is_added", "spread"),
    [(64, 1024, 128, False, 0.0), (192, 1024, 64, True, 1.0), (64, 2048, 256, True, 1.0)],
)
def test_products_are_the_references(n, k, group, is_added, spread, config):
    weight = make("whole 4", n, k, group, has_bias=n == 192)
    prepared = module.pack_codes(weight)
    x_TK, expected_TN = rows_of(1, k, spread), torch.empty(1, n, device=DEVICE)
    out_TN = torch.randn(2, n, device=DEVICE)
    behind_N, before_TN = out_TN[-1].clone(), out_TN[:-1].clone() if is_added else 0.0
    launch_vector(x_TK, prepared, out_TN[:-1], config, add=is_added)
    reference.packed_linear(x_TK, weight, expected_TN)
    assert torch.equal(out_TN[-1], behind_N), "wrote beyond its row"
    assert error_of(out_TN[:-1], expected_TN + before_TN) < 1e-4


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("group", [64, 128])
def test_gate_and_up_are_made_one(group, config):
    weight = make("whole 4", 192, 1024, group, has_bias=group == 64)
    x_TK, wide_TN = rows_of(1, 1024), torch.empty(1, 192, device=DEVICE)
    reference.packed_linear(x_TK, weight, wide_TN)
    gate, up = wide_TN.chunk(2, dim=1)
    out_TI = torch.empty(1, 96, device=DEVICE)
    launch_vector(x_TK, module.pack_codes(weight), out_TI, config, kind="silu")
    assert error_of(out_TI, torch.nn.functional.silu(gate) * up) < 1e-4


def test_inputs_of_any_size_are_multiplied():
    weight = make("whole 4", 64, 1024, 64, has_bias=False)
    prepared, x_TK = module.pack_codes(weight), rows_of(1, 1024)
    x_TK[0, :512] *= 2.0**40
    x_TK[0, 512:] *= 2.0**-60
    expected_TN, out_TN = torch.empty(1, 64, device=DEVICE), torch.empty(1, 64, device=DEVICE)
    reference.packed_linear(x_TK, weight, expected_TN)
    launch_vector(x_TK, prepared, out_TN, VectorConfig())
    assert error_of(out_TN, expected_TN) < 1e-4
    launch_vector(torch.zeros_like(x_TK), prepared, out_TN, VectorConfig())
    assert torch.equal(out_TN, torch.zeros(1, 64, device=DEVICE))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(value):
    prepared, x_TK = module.pack_codes(make("whole 4", 64, 1024, 64)), rows_of(1, 1024)
    x_TK[0, 77] = value
    out_TN = torch.empty(1, 64, device=DEVICE)
    launch_vector(x_TK, prepared, out_TN, VectorConfig())
    assert not out_TN.isfinite().any()


@pytest.mark.parametrize("half", [-1, 0, 1])
def test_the_gpus_instructions_multiply_the_same_columns(half):
    """Of a word, eight codes; of a thread's four pairs of inputs, the bytes as `_bytes` puts them."""
    for seed in range(20):
        numbers = torch.Generator().manual_seed(seed)
        code = torch.randint(0, 16, (4, 2), generator=numbers).tolist()  # of a part, the lower half and the upper
        x = torch.randint(-(2**15), 2**15, (4, 2), generator=numbers).tolist()
        word = sum(code[part][side] << 4 * part + 16 * side for part in range(4) for side in range(2))
        registers = {"$1": word}
        pairs = [(0, 2), (1, 3)] if half < 0 else [(2 * half, 2 * half + 1)] * 2
        for place, (first, second) in enumerate(pairs):
            four = [x[first][0], x[second][0], x[first][1], x[second][1]]
            for byte in range(2):
                value = sum((number >> 8 * byte & 255) << 8 * at for at, number in enumerate(four))
                registers[f"${2 + 2 * place + byte}"] = value
        parts = range(4) if half < 0 else range(2 * half, 2 * half + 2)
        expected = sum(code[part][side] * x[part][side] for part in parts for side in range(2))
        assert permuted(packed_vector._assembly(half), registers)["$0"] == expected & 0xFFFFFFFF


def test_other_weights_and_numbers_of_rows_are_not_for_it():
    weight = module.pack_codes(make("whole 4", 128, 1024, 64))
    assert packed_vector.choose(weight, 1) is not None
    assert packed_vector.choose(weight, 2) is None
    for other in (make("whole 4", 120, 1024, 64), make("whole 4", 128, 1152, 64), make("whole 4", 128, 1024, 32),
                  make("whole 4", 128, 1024, 64, is_permuted=True), make("table 4", 128, 1024, 64),
                  make("whole 8", 128, 1024, 64), make("whole 4", 16, 8192, 64)):  # fmt: skip
        assert packed_vector.choose(module.pack_codes(other), 1) is None


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.usefixtures("platform")
def test_the_gated_operation_is_the_references(rows):
    weight = make("whole 4", 128, 1024, 64)
    prepared, x_TK, norm_K = module.pack_codes(weight), rows_of(rows, 1024), torch.rand(1024, device=DEVICE) + 0.5
    scratch_TK, wide_TN = torch.empty_like(x_TK), torch.empty(rows, 128, device=DEVICE, dtype=torch.bfloat16)
    expected_TI, out_TI = torch.empty(rows, 64, device=DEVICE), torch.empty(rows, 64, device=DEVICE)
    given = norm_K, EPS, weight, "silu"
    reference.packed_norm_linear_gated(x_TK, *given, expected_TI, scratch_TK, wide_TN)
    ops.packed_norm_linear_gated(x_TK, norm_K, EPS, prepared, "silu", out_TI, scratch_TK, wide_TN)
    assert error_of(out_TI, expected_TI) < 2.0**-6


@pytest.mark.exhaustive
def test_a_decoder_gives_the_same_however_one_row_is_multiplied(platform, tmp_path, monkeypatch):  # noqa: F811
    path = make_tiny_model(
        "Qwen3ForCausalLM",
        tmp_path,
        tokenizer=False,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=1,
        head_dim=64,
    )
    launches = []
    monkeypatch.setattr(
        packed_vector, "launch_vector", lambda *args, **given: (launches.append(given), launch_vector(*args, **given))
    )

    def logprobs():
        loaded = load(platform, path, "bfloat16", quantization="int4")
        driver, sequence = ModelDriver(cast(Decoder, loaded.model)), Sequence([5, 99], row=0)
        return torch.cat([*driver.step([(sequence, 1)]), *driver.step([(sequence, 1)])])

    by_bytes = logprobs()
    assert any(given.get("kind") == "silu" for given in launches) and any(given.get("add") for given in launches)
    launches.clear()
    monkeypatch.setattr(packed_vector, "choose", lambda weight, rows: None)
    plain = logprobs()
    assert not launches
    torch.testing.assert_close(by_bytes, plain, rtol=0, atol=0.4)  # both round activations to bfloat16, at other places
    assert (by_bytes - plain).abs().mean() < 0.05
