"""What `tools/gpu_check.py` draws: every kernel of the GPU has a draw, whose small cases pass in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.interpreter import repair_interpreter
from tools.gpu_cases import Case, draws, error_of, moved
from tools.gpu_check_kernels import all_names, check_draw, check_kernels, select_kernels

from quire.kernels import ops, registry
from quire.kernels.triton.launch import interpreted
from quire.kernels.triton.packed import vector as packed_vector
from quire.kernels.types import LinearWeight

DEVICE = "cpu" if interpreted() else "cuda"
SLACK = 2.0 if interpreted() else 1.0
"""The interpreter cuts bfloat16 off where a GPU rounds it."""


@pytest.fixture(autouse=True)
def platform(kept_selection):
    """The CUDA platform's kernels, for one test."""
    repair_interpreter()
    select_kernels(DEVICE)


def test_every_native_operation_has_a_draw():
    drawn = {name.partition(",")[0] for name in draws}
    assert drawn == {op for op in ops.choices() if ops.is_native(op) and not op.startswith("pack_")}


@pytest.mark.parametrize("name", all_names())
def test_a_small_case_passes_in_the_interpreter(name):
    lines = check_draw(name, DEVICE, [1], is_small=True, slack=SLACK)
    assert lines and [line for line in lines if not line.passed] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", all_names())
def test_more_small_cases_pass_in_the_interpreter(name):
    lines = check_draw(name, DEVICE, range(8), seed=1, is_small=True, slack=SLACK)
    assert [line for line in lines if not line.passed] == []


def test_draws_are_checked_in_processes_and_told_in_their_order():
    names = ["keep_tokens", "no such operation", "clip"]
    lines = list(check_kernels(DEVICE, names, rounds=[0], is_small=True, processes=2))
    assert [line.label.partition(" (")[0] for line in lines] == names
    assert [line.passed for line in lines] == [True, False, True]
    assert lines[1].detail == "its process ended with 1"


def test_a_kernel_that_errs_or_raises_is_told_with_the_case(monkeypatch):
    def clip(x_TC, limit):
        x_TC.clamp_(-1.2 * limit, 1.2 * limit)

    def fail(*_):
        raise RuntimeError("no such thing")

    for function, why in ((clip, "case 0 off by "), (fail, "case 0: RuntimeError: no such thing")):
        broken = next(entry for entry in registry.implementations("clip") if entry.platform == "cuda")
        monkeypatch.setitem(vars(broken), "function", function)
        (line,) = check_draw("clip", DEVICE, range(2), is_small=True)
        assert not line.passed and line.detail.startswith(why)


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
    assert (
        moved(weight, "cpu", torch.bfloat16).data.dtype is moved(weight, "cpu", torch.bfloat16).dtype is torch.float32
    )
    assert moved(weight, "cpu", None).data.dtype is torch.bfloat16


@pytest.mark.parametrize("name", [name for name in draws if name.endswith("one row")])
def test_one_row_goes_to_its_own_kernel(name, monkeypatch):
    launches, launch = [], packed_vector.launch_vector
    monkeypatch.setattr(
        packed_vector, "launch_vector", lambda *args, **given: (launches.append(given), launch(*args, **given))
    )
    check_draw(name, DEVICE, [1], is_small=True, slack=SLACK)
    assert launches
