"""What the conformance suite draws: every kernel of the GPU has a draw, whose small cases pass in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.interpreter import repair_interpreter

from quire.conformance import cases
from quire.conformance.cases.batches import make_batch
from quire.conformance.cases.case import Case, draws, error_of, moved
from quire.conformance.kernel_checks import Target, check_draw
from quire.kernels import ops, registry, triton
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.types import LinearWeight

cases.load()
DEVICE = "cpu" if interpreted() else "cuda"
TARGET = Target("cuda", DEVICE, slack=2.0 if interpreted() else 1.0)
"""The interpreter cuts bfloat16 off where a GPU rounds it."""


@pytest.fixture(autouse=True)
def platform(kept_selection):
    """The CUDA platform's kernels, for one test."""
    repair_interpreter()
    if not interpreted():
        from quire.kernels.triton.runtime import door

        door.install_driver()
    triton.register()
    ops.select("cuda")


def test_every_native_operation_has_a_draw():
    drawn = {name.partition(",")[0] for name in draws}
    assert drawn >= {op for op in ops.choices() if ops.is_native(op) and not op.startswith("pack_")}


def failures_of(name, rounds, seed=0):
    verdicts = check_draw(name, TARGET, rounds, seed, is_small=True)
    own = [entry for entry in registry.implementations(name.partition(",")[0]) if entry.platform == "cuda"]
    assert len(verdicts) == len(own) and all(verdict.num_cases for verdict in verdicts)
    return [verdict.failure for verdict in verdicts if verdict.failure]


@pytest.mark.parametrize("name", sorted(draws))
def test_a_small_case_passes_in_the_interpreter(name):
    assert failures_of(name, [1]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(draws))
def test_more_small_cases_pass_in_the_interpreter(name):
    assert failures_of(name, range(8), seed=1) == []


def test_a_kernel_that_errs_or_raises_is_told_with_the_case(monkeypatch):
    def clip(x_TC, limit):
        x_TC.clamp_(-1.2 * limit, 1.2 * limit)

    def fail(*_):
        raise RuntimeError("no such thing")

    for function, why in ((clip, "case 0 (float32): off by "), (fail, "case 0 (float32): RuntimeError: no such thing")):
        broken = next(entry for entry in registry.implementations("clip") if entry.platform == "cuda")
        monkeypatch.setitem(vars(broken), "function", function)
        (verdict,) = check_draw("clip", TARGET, range(2), is_small=True)
        assert verdict.failure.startswith(why)


def test_what_is_written_between_rows_or_not_written_is_an_error():
    wide = torch.randn(3, 10)
    case = Case([wide[:, 2:8]], (0,), torch.float32)
    (ours,), (expected,) = ([moved(argument, "cpu", None) for argument in case.arguments] for _ in range(2))
    assert ours.stride() == (10, 1) and error_of(case, ours, expected) == 0
    ours.as_strided((1,), (1,), 9)[0] = 7.0  # behind the first row
    assert error_of(case, ours, expected) > 0.1
    assert error_of(case, torch.full((2,), torch.nan), torch.ones(2)) == float("inf")
    assert error_of(case, torch.ones(2), torch.full((2,), torch.nan)) == float("inf")


def test_a_reference_gets_float32_and_kernels_get_what_was_drawn():
    weight = LinearWeight(2, 4, torch.bfloat16, torch.randn(2, 4).bfloat16())
    plain = moved(weight, "cpu", torch.bfloat16)
    assert plain.data is not None and plain.data.dtype is plain.dtype is torch.float32
    kept = moved(weight, "cpu", None)
    assert kept.data is not None and kept.data.dtype is torch.bfloat16


def test_rows_have_the_type_of_activations_and_weights_and_pages_keep_theirs():
    weight = LinearWeight(2, 4, torch.bfloat16, torch.randn(2, 4).bfloat16())
    arguments = [torch.randn(3, 4).bfloat16(), torch.randn(2, 9).bfloat16(), weight, torch.zeros(3)]
    x, pages, kept, out = Case(arguments, (3,), torch.bfloat16, pages=(1,)).with_activations(torch.float32).arguments
    assert [x.dtype, pages.dtype, kept.data.dtype, out.dtype] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]


@pytest.mark.parametrize("name", [name for name in draws if name.endswith("one row")])
def test_one_row_goes_to_its_own_kernel(name, monkeypatch):
    launches, launch = [], packed_vector.launch_vector
    monkeypatch.setattr(
        packed_vector, "launch_vector", lambda *args, **given: (launches.append(given), launch(*args, **given))
    )
    check_draw(name, TARGET, [1], is_small=True)
    assert launches


def test_page_tables_by_row_become_tables_by_request():
    from quire.kernels.triton.attention.page_tables import gather_tables

    metadata = moved(make_batch([3000, 16, 17, 1, 900], padding=2).metadata, DEVICE, None)
    tables_BP = torch.full((7, metadata.block_table.shape[1]), -7, dtype=torch.int32, device=DEVICE)
    lens_B = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    gather_tables(metadata, tables_BP, lens_B)
    expected_BP = metadata.block_table[metadata.rows.long()]
    pages_P, counts_B = torch.arange(tables_BP.shape[1], device=DEVICE), (lens_B + 15) // 16
    is_used_BP = pages_P < counts_B[:, None]
    assert torch.equal(lens_B, metadata.seq_lens.clamp(min=1))
    assert bool((tables_BP == expected_BP)[is_used_BP].all() and (tables_BP == -7)[~is_used_BP].all())
