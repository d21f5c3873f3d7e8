"""Codes times a few rows, with the norm before and the activation, bias or residual after: the references' results."""

from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.test_packed_expert_decoder import load, platform  # noqa: F401 (a fixture)
from tests.kernels.triton.test_packed_tiles import DEVICE, KINDS, make
from tests.oracles.model_driver import ModelDriver, Sequence

from quire.benchmarks.tiny_models import make_tiny_model
from quire.kernels import ops
from quire.kernels.reference import packed as reference
from quire.kernels.triton import packed as module
from quire.kernels.triton import packed_rows
from quire.kernels.triton.packed_rows import RowsConfig, launch_packed_rows
from quire.layers.decoder import Decoder

CONFIGS = [RowsConfig(), RowsConfig(16, 8, 2)]
EPS = 1e-6


def error_of(got, expected):
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def rows_of(count, k):
    return torch.randn(count, k, generator=torch.Generator().manual_seed(count + k)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(130, 512, 128), (40, 384, 32), (128, 192, 64), (24, 128, 16), (96, 640, 640)]
)
def test_products_are_the_references(kind, n, k, group, config):
    weight = make(kind, n, k, group, is_permuted=n == 40, has_bias=n % 16 == 8)
    prepared = module.pack_codes(weight)
    for rows, is_added in ((1, False), (3, True), (8, False)):
        x_TK, expected_TN = rows_of(rows, k), torch.empty(rows, n, device=DEVICE)
        out_TN = torch.randn(rows + 1, n, device=DEVICE)
        behind_N, before_TN = out_TN[-1].clone(), out_TN[:-1].clone() if is_added else 0.0
        launch_packed_rows(x_TK, prepared, out_TN[:-1], config, add=is_added)
        reference.packed_linear(x_TK, weight, expected_TN)
        assert torch.equal(out_TN[-1], behind_N), "wrote beyond its rows"
        assert error_of(out_TN[:-1], expected_TN + before_TN) < 1e-5


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("kind", "group"), [("whole 4", 128), ("whole 4", 32), ("table 4", 64), ("whole 8", 32)])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_norms_and_activations_are_done_on_the_way(kind, group, is_permuted, config):
    n, k = 192, 384
    weight = make(kind, n, k, group, is_permuted=is_permuted)
    prepared = module.pack_codes(weight)
    norm_K = torch.tensor([0.5, 1.0, -2.0], device=DEVICE).repeat(k // 3)  # products with these are not rounded
    for rows in (1, 5):
        x_TK, wide_TN = rows_of(rows, k), torch.empty(rows, n, device=DEVICE)
        reference.packed_norm_linear(x_TK, norm_K, EPS, weight, wide_TN, x_TK)
        out_TN = torch.empty(rows, n, device=DEVICE)
        launch_packed_rows(x_TK, prepared, out_TN, config, norm_K=norm_K, eps=EPS)
        assert error_of(out_TN, wide_TN) < 1e-5
        gate, up = wide_TN.chunk(2, dim=1)
        out_TI = torch.empty(rows, n // 2, device=DEVICE)
        launch_packed_rows(x_TK, prepared, out_TI, config, norm_K=norm_K, eps=EPS, kind="silu")
        assert error_of(out_TI, torch.nn.functional.silu(gate) * up) < 1e-5


def test_blocks_that_would_reach_over_both_halves_are_not_gated():
    weight = module.pack_codes(make("whole 4", 96, 128, 64))
    assert packed_rows.choose(weight) is not None and packed_rows.choose(weight, is_gated=True) is None
    assert packed_rows.choose(module.pack_codes(make("whole 4", 128, 128, 64)), is_gated=True) is not None


@pytest.mark.parametrize("rows", [2, 12])
@pytest.mark.parametrize("few", [0, packed_rows.MAX_ROWS])
@pytest.mark.usefixtures("platform")
def test_operations_are_the_references_whoever_computes_them(few, rows, monkeypatch):
    monkeypatch.setattr(module, "FEW_ROWS", few)
    weight = make("whole 4", 128, 256, 64)
    prepared, x_TK, norm_K = module.pack_codes(weight), rows_of(rows, 256), torch.rand(256, device=DEVICE) + 0.5
    scratch_TK, wide_TN = torch.empty_like(x_TK), torch.empty(rows, 128, device=DEVICE, dtype=torch.bfloat16)
    expected_TN, out_TN = torch.empty(rows, 128, device=DEVICE), torch.empty(rows, 128, device=DEVICE)
    reference.packed_norm_linear(x_TK, norm_K, EPS, weight, expected_TN, scratch_TK)
    ops.chosen("packed_norm_linear")(x_TK, norm_K, EPS, prepared, out_TN, scratch_TK)
    assert error_of(out_TN, expected_TN) < 2.0**-7
    expected_TI, out_TI = torch.empty(rows, 64, device=DEVICE), torch.empty(rows, 64, device=DEVICE)
    given = norm_K, EPS, weight, "silu"
    reference.packed_norm_linear_gated(x_TK, *given, expected_TI, scratch_TK, wide_TN)
    ops.chosen("packed_norm_linear_gated")(x_TK, norm_K, EPS, prepared, "silu", out_TI, scratch_TK, wide_TN)
    assert error_of(out_TI, expected_TI) < 2.0**-6


def test_a_decoder_gives_the_same_however_its_few_rows_are_multiplied(platform, tmp_path, monkeypatch):  # noqa: F811
    path = make_tiny_model(
        "Qwen3ForCausalLM", tmp_path, tokenizer=False, hidden_size=128, intermediate_size=192, num_hidden_layers=2
    )
    launches = []
    launch = packed_rows.launch_packed_rows
    monkeypatch.setattr(
        packed_rows, "launch_packed_rows", lambda *args, **given: (launches.append(given), launch(*args, **given))
    )

    def logprobs():
        loaded = load(platform, path, "bfloat16", quantization="int4")
        driver, sequence = ModelDriver(cast(Decoder, loaded.model)), Sequence([5, 99, 301, 17, 5, 44], row=0)
        return torch.cat([*driver.step([(sequence, 4)]), *driver.step([(sequence, 1)]), *driver.step([(sequence, 1)])])

    plain = logprobs()
    assert not launches
    monkeypatch.setattr(module, "FEW_ROWS", packed_rows.MAX_ROWS)
    fused = logprobs()
    assert any(given.get("kind") == "silu" for given in launches) and any(given.get("add") for given in launches)
    torch.testing.assert_close(fused, plain, rtol=0, atol=0.4)  # both round activations to bfloat16, at other places
    assert (fused - plain).abs().mean() < 0.05
