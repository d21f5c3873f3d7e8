"""Every way in which Triton multiplies a matrix, against the plain reference; and rows against themselves in other batches."""

import dataclasses
import itertools

import pytest
import torch
from tests.oracles.operations import linear as reference
from tests.oracles.operations import norm as elementwise

from quire.kernels import ops, registry
from quire.kernels.triton.linear import configs as linear_configs
from quire.kernels.triton.linear import embedding as linear_embedding
from quire.kernels.triton.linear import matmul as linear
from quire.kernels.triton.linear.configs import DotConfig, GemvConfig
from quire.kernels.triton.norm import (
    activations,  # noqa: F401
    norms,  # noqa: F401
)
from quire.kernels.types import LinearWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def cuda_kernels() -> None:
    ops.select("cuda")  # other tests choose others


GEMV = GemvConfig(4, 64, 1)
DOT = DotConfig(16, 16, 32, 1, 2, 1)
CONFIGS = [
    GEMV,
    GemvConfig(2, 256, 1),
    DOT,
    dataclasses.replace(DOT, split=3),
    dataclasses.replace(DOT, block_n=64, num_warps=4),
    dataclasses.replace(DOT, block_n=64, split=2, num_warps=4),
    None,
]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype, has_bias: bool = False) -> LinearWeight:
    return linear.pack_linear(randn(rows, columns, dtype=dtype) / columns**0.5, randn(rows) if has_bias else None)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(result.float(), expected.float(), atol=bound, rtol=bound)


def run_all(module, x_TK, norm_K, plain, pair, kind, residual_TN):
    """The four operations of a module, into poisoned outputs."""
    rows, n = x_TK.shape[0], plain.out_features
    module, own = (linear, {"is_invariant": True}) if module == "invariant" else (module, {})
    outs = [torch.full((rows, n), float("nan"), dtype=x_TK.dtype, device=DEVICE) for _ in range(3)]
    scratch, wide, residual = torch.empty_like(x_TK), x_TK.new_empty(rows, 2 * n), residual_TN.clone()
    module.linear(x_TK, plain, outs[0], **own)
    module.norm_linear(x_TK, norm_K, 1e-5, plain, outs[1], scratch, **own)
    module.norm_linear_gated(x_TK, norm_K, 1e-5, pair, kind, outs[2], scratch, wide, **own)
    module.linear_add(x_TK, plain, residual, **own)
    return [*outs, residual]


@pytest.fixture(autouse=True)
def the_same_numbers_every_time():
    """Tolerances are for these: what other tests drew before must not decide."""
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_kernel_equals_the_reference_on_ragged_shapes(config, dtype, monkeypatch):
    monkeypatch.setattr(linear_configs, "choose", lambda *_: config)
    few = isinstance(config, GemvConfig)
    shapes = [(1, 8, 64), (3, 21, 100)] if few else [(1, 8, 64), (17, 37, 104)]
    for (rows, n, k), has_bias in zip(shapes, itertools.cycle([False, True]), strict=False):
        x_TK, norm_K, residual_TN = randn(rows, k, dtype=dtype) * 2, randn(k), randn(rows, n, dtype=dtype)
        plain, pair = matrix(n, k, dtype, has_bias), matrix(2 * n, k, dtype, has_bias)
        results = run_all(linear, x_TK, norm_K, plain, pair, "gelu_tanh", residual_TN)
        expected = run_all(reference, x_TK, norm_K, plain, pair, "gelu_tanh", residual_TN)
        for result, wanted in zip(results, expected, strict=True):
            assert_close(result, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 5, 33, 130])
def test_the_chosen_kernel_equals_the_reference(rows, dtype):
    x_TK, norm_K, residual_TN = randn(rows, 72, dtype=dtype), randn(72), randn(rows, 20, dtype=dtype)
    plain, pair = matrix(20, 72, dtype, True), matrix(40, 72, dtype)
    results = run_all(linear, x_TK, norm_K, plain, pair, "silu", residual_TN)
    expected = run_all(reference, x_TK, norm_K, plain, pair, "silu", residual_TN)
    for result, wanted in zip(results, expected, strict=True):
        assert_close(result, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rows_of_an_odd_length_are_padded(dtype, monkeypatch):
    monkeypatch.setattr(linear_configs, "choose", lambda *_: None)
    rows, columns = linear.MANY_ROWS, 67
    x_TK, norm_K, residual_TN = randn(rows, columns, dtype=dtype), randn(columns), randn(rows, 20, dtype=dtype)
    plain, pair = matrix(20, columns, dtype, True), matrix(40, columns, dtype)
    seen = [each.shape for each in linear._operands(x_TK, plain)]
    assert seen == [(rows, 72 if dtype == torch.bfloat16 else 68), (seen[0][1], 20)]
    results = run_all(linear, x_TK, norm_K, plain, pair, "silu", residual_TN)
    expected = run_all(reference, x_TK, norm_K, plain, pair, "silu", residual_TN)
    for result, wanted in zip(results, expected, strict=True):
        assert_close(result, wanted, dtype)


@pytest.mark.parametrize("rows", [1, 3, 7, 200])
def test_logits_are_float32_of_bfloat16_weights(rows):
    x_TK, head = randn(rows, 64, dtype=torch.bfloat16), matrix(101, 64, torch.bfloat16)
    out_TN = torch.full((rows, 101), float("nan"), device=DEVICE)
    linear.linear(x_TK, head, out_TN)
    expected_TN = x_TK.float() @ head.data.float().t()
    bound = 1e-5 if rows < 200 or out_TN.is_cuda else 3e-2
    torch.testing.assert_close(out_TN, expected_TN, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_do_not_depend_on_the_batch_in_deterministic_mode(dtype):
    x_TK, norm_K, residual_TN = randn(70, 48, dtype=dtype), randn(48), randn(70, 24, dtype=dtype)
    plain, pair = matrix(24, 48, dtype, True), matrix(48, 48, dtype)
    whole = run_all("invariant", x_TK, norm_K, plain, pair, "silu", residual_TN)
    expected = run_all(reference, x_TK, norm_K, plain, pair, "silu", residual_TN)
    for result, wanted in zip(whole, expected, strict=True):
        assert_close(result, wanted, dtype)
    for part in (slice(0, 1), slice(63, 66)):
        results = run_all("invariant", x_TK[part], norm_K, plain, pair, "silu", residual_TN[part])
        for result, all_rows in zip(results, whole, strict=True):
            assert torch.equal(result, all_rows[part])


def test_deterministic_mode_takes_only_what_is_invariant():
    for op in ("pack_linear", "linear", "norm_linear", "norm_linear_gated", "linear_add", "embedding", "add_embedding"):
        fast, fixed = registry.choose(op, "cuda").chosen, registry.choose(op, "cuda", deterministic=True).chosen
        assert fixed.invariant and fixed.platform == fast.platform == "cuda"


def test_a_split_product_leaves_its_counters_at_zero_and_its_bits_do_not_change(monkeypatch):
    monkeypatch.setattr(linear_configs, "choose", lambda *_: dataclasses.replace(DOT, split=4))
    x_TK, weight = randn(20, 256, dtype=torch.bfloat16), matrix(48, 256, torch.bfloat16)
    outs = [torch.empty(20, 48, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    for out_TN in outs:
        linear.linear(x_TK, weight, out_TN)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not linear.split_workspace(weight.data.device)[1].any()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.float32), (1500, torch.bfloat16)])
def test_embeddings_equal_the_reference(rows, width, dtype):
    ids_T = torch.randint(0, 33, (rows,), dtype=torch.int32, device=DEVICE)
    table, expected_TD = matrix(33, width, dtype), torch.empty(rows, width, dtype=dtype, device=DEVICE)
    out_TD = torch.full_like(expected_TD, float("nan"))
    linear_embedding.embedding(ids_T, table, out_TD, 1.5)
    reference.embedding(ids_T, table, expected_TD, 1.5)
    assert_close(out_TD, expected_TD, dtype)
    linear_embedding.add_embedding(ids_T, table, out_TD)
    reference.add_embedding(ids_T, table, expected_TD)
    assert_close(out_TD, expected_TD, dtype)


def test_an_id_outside_the_table_gives_zeros():
    out_TD = torch.ones(2, 8, device=DEVICE)
    ids_T = torch.tensor([-1, 5], dtype=torch.int32, device=DEVICE)
    linear_embedding.embedding(ids_T, matrix(5, 8, torch.float32), out_TD)
    assert not out_TD.any()


def test_rows_that_lie_apart_are_refused():
    wide_TK, weight = randn(2, 32), matrix(8, 16, torch.float32)
    with pytest.raises(ValueError, match="lie together"):
        linear.linear(wide_TK[:, :16], weight, randn(2, 8))


def test_no_rows_are_no_work():
    weight, empty_TK = matrix(8, 16, torch.float32), torch.empty(0, 16, device=DEVICE)
    for module in (linear, "invariant"):
        run_all(
            module, empty_TK, randn(16), weight, matrix(16, 16, torch.float32), "silu", torch.empty(0, 8).to(DEVICE)
        )


def test_the_reference_agrees_with_what_the_fused_operations_promise():
    """The oracle itself: a gated product is its parts."""
    x_TK, norm_K, pair = randn(3, 32), randn(32), matrix(20, 32, torch.float32)
    normed_TK, wide, out_TN, parts_TN = torch.empty_like(x_TK), randn(3, 20), randn(3, 10), randn(3, 10)
    elementwise.rms_norm(x_TK, norm_K, 1e-5, normed_TK)
    reference.linear(normed_TK, pair, wide)
    elementwise.gated_activation(wide, "silu", parts_TN)
    reference.norm_linear_gated(x_TK, norm_K, 1e-5, pair, "silu", out_TN, normed_TK, wide)
    torch.testing.assert_close(out_TN, parts_TN)
