"""Triton's filters and filtered draws against sorted rows in float64."""

import pytest
import torch
from tests.oracles.operations import sampling as reference

from quire.kernels.triton.sampling import filters, filters_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
INFINITY = float("inf")


def run(module, logits_SV, columns, seed: int = 0):
    rows = len(logits_SV)
    threshold_S = torch.full((rows,), float("nan"), device=DEVICE)
    out_S = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    seed_S = torch.arange(rows, device=DEVICE) + seed
    module.filtered_gumbel_argmax(logits_SV, *columns, seed_S, seed_S + 3, threshold_S, out_S)
    return threshold_S.tolist(), out_S.tolist()


def columns_of(*rows: tuple[float, int, float, float]) -> list[torch.Tensor]:
    """Columns from rows of (inverse temperature, top-k, top-p, min-p)."""
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.tensor(v, dtype=t, device=DEVICE) for v, t in zip(zip(*rows, strict=True), types, strict=True)]


MIXED = (
    (0.5, 0, 0.9, 0.0),
    (1.0, 5, 1.0, 0.0),
    (INFINITY, 3, 0.5, 0.3),
    (0.7, 50, 0.5, 0.02),
    (3.1, 0, 0.3, 0.5),
    (1.0, 300, 0.99, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.0, 0, 1.0, 0.1),
    (1.0, 2000, 1.0, 0.0),
    (0.5, 1500, 0.7, 0.001),
)


@pytest.mark.parametrize("vocabulary", [1, 97, 1500, pytest.param(9000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_thresholds_and_draws_equal_the_reference(vocabulary, scale):
    generator = torch.Generator().manual_seed(vocabulary)
    logits_SV = (torch.randn(len(MIXED), vocabulary, generator=generator) * scale).to(DEVICE)
    assert run(filters, logits_SV, columns_of(*MIXED)) == run(reference, logits_SV, columns_of(*MIXED))


DEEP = (
    (1.0, 0, 0.9, 0.0),
    (0.5, 0, 0.999, 0.0),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 700, 0.9, 0.0),
    (1.0, 3000, 1.0, 0.0),
    (1.0, 3000, 0.9, 0.0),
    (1.0, 0, 0.9, 0.05),
    (1.0, 3500, 1.0, 0.01),
)


@pytest.mark.parametrize(
    ("region", "scale"),
    [
        (4096, 1.0),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((4096, 3.0), (64, 1.0), (64, 3.0))),
    ],
)
def test_cuts_below_the_head_are_found_in_a_window_or_by_a_search(region, scale, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    logits_SV = (torch.randn(len(DEEP), 16000, generator=generator) * scale).to(DEVICE)
    monkeypatch.setattr(filters_window, "REGION", region)
    left_open = []
    search = filters_window.solve_open_rows

    def solve_and_look(*arguments):
        search(*arguments)
        left_open.append(int(arguments[5].sum()))

    monkeypatch.setattr(filters, "solve_open_rows", solve_and_look)
    assert run(filters, logits_SV, columns_of(*DEEP)) == run(reference, logits_SV, columns_of(*DEEP))
    assert (left_open[0] == 0) == (region == 4096)


def test_ties_at_a_cut_are_kept_whole():
    logits_SV = torch.zeros(4, 9000, device=DEVICE)
    logits_SV[:, 100:103] = 1.0
    logits_SV[:, 8999] = 2.0
    columns = columns_of((1.0, 2, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.0, 700, 1.0, 0.0), (1.0, 0, 0.5, 0.0))
    thresholds, tokens = run(filters, logits_SV, columns)
    assert thresholds == [1.0, 1.0, 0.0, 0.0]
    assert (thresholds, tokens) == run(reference, logits_SV, columns)


def test_a_rows_threshold_does_not_depend_on_the_batch():
    logits_SV = (torch.randn(len(MIXED), 3000) * 2).to(DEVICE)
    whole = run(filters, logits_SV, columns_of(*MIXED))
    for row in (0, 5, 9):
        alone = run(filters, logits_SV[row : row + 1], columns_of(MIXED[row]), seed=row)
        assert alone == ([whole[0][row]], [whole[1][row]])


def test_a_greedy_row_takes_the_largest_whatever_its_filters():
    logits_SV = torch.randn(1, 3000, device=DEVICE)
    thresholds, tokens = run(filters, logits_SV, columns_of((INFINITY, 5, 0.1, 0.9)))
    assert thresholds == [-INFINITY]
    assert tokens == [int(logits_SV.argmax())]


@pytest.mark.parametrize("value", [-INFINITY, INFINITY, float("nan"), 0.0])
def test_a_row_of_one_odd_value_gives_an_index_of_the_row(value):
    logits_SV = torch.full((2, 9000), value, device=DEVICE)
    _, tokens = run(filters, logits_SV, columns_of((1.0, 700, 0.9, 0.1), (1.0, 0, 0.9, 0.0)))
    assert all(0 <= token < 9000 for token in tokens)


def test_hiding_leaves_what_reaches_the_threshold():
    logits_SV = torch.randn(3, 2100, device=DEVICE)
    logits_SV[0, 5] = -INFINITY
    threshold_S = torch.tensor([0.5, -INFINITY, 0.0], device=DEVICE)
    expected_SV = logits_SV.clone()
    reference.hide_below(expected_SV, threshold_S)
    filters.hide_below(logits_SV, threshold_S)
    assert torch.equal(logits_SV, expected_SV)
