"""Top-k, top-p and min-p as one threshold a row: tokens whose logit is at least the threshold may be drawn.

Every one of the three keeps a head of the descending order, so together they are a single cut. Ties at the cut are kept
whole, which makes the result independent of how equal logits are ordered. The order of filters is min-p, then top-k,
then top-p over what is left, each on the distribution after temperature.

Legend: F rows that filter, V vocabulary, M largest logits looked at.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from quire.sample.top_values import top_values

CANDIDATES = 128
"""Largest logits looked at for top-p before the whole row is sorted; most nuclei of a trained model are smaller."""
SUM_PARTS = 8
"""Rows are summed in this many parts, so that one row is never divided among threads in a way that depends on the batch."""

Doubles = npt.NDArray[np.float64]


@dataclasses.dataclass
class FilterRows:
    """The filters of F rows. `top_k` of 0 and `top_p` of 1 mean off; `min_p` of 0 as well."""

    inverse_temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]

    def pick(self, index: npt.NDArray[np.intp]) -> "FilterRows":
        """Some of the rows."""
        return FilterRows(self.inverse_temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def compute_thresholds(logits_FV: torch.Tensor, filters: FilterRows, scratch_FV: torch.Tensor) -> torch.Tensor:
    """The smallest logit of each row that may be drawn, float32 [F].

    Args:
        scratch_FV: overwritten; of the logits' shape.
    """
    vocabulary = logits_FV.shape[1]
    bounded = (filters.top_k > 0) & (filters.top_k < vocabulary)
    if bounded.all():
        thresholds = _bounded(logits_FV, filters)
    else:
        thresholds = np.full(len(filters.top_k), -np.inf)
        nucleus = ~bounded & (filters.top_p < 1)
        for members, compute in ((bounded, _bounded), (nucleus, _nucleus), (~bounded & ~nucleus, _only_min_p)):
            index = np.flatnonzero(members)
            if len(index) == len(members):
                thresholds = compute(logits_FV, filters, scratch_FV)
            elif len(index):
                chosen = logits_FV[torch.from_numpy(index).to(logits_FV.device)]
                thresholds[index] = compute(chosen, filters.pick(index), scratch_FV[: len(index)])
    return torch.from_numpy(thresholds.astype(np.float32)).to(logits_FV.device)


def hide_below(logits_FV: torch.Tensor, thresholds_F: torch.Tensor) -> None:
    """Set logits under their row's threshold to minus infinity, in place."""
    # `threshold_` keeps what is larger than its bound and takes one pass without a temporary; a mask takes four times as long.
    bounds = torch.nextafter(thresholds_F, torch.tensor(-torch.inf)).tolist()
    for logits_V, bound in zip(logits_FV, bounds, strict=True):
        torch.threshold_(logits_V, bound, -torch.inf)


def _as_doubles(values: torch.Tensor) -> Doubles:
    return values.cpu().numpy().astype(np.float64)


def _min_p_floor(largest_F: Doubles, filters: FilterRows) -> Doubles | None:
    """Logits below this have less than min_p times the largest probability; None if no row has a min-p."""
    if not filters.min_p.any():
        return None
    with np.errstate(divide="ignore"):
        return largest_F + np.log(filters.min_p.astype(np.float64)) / filters.inverse_temperature


def _only_min_p(logits_FV: torch.Tensor, filters: FilterRows, _scratch: torch.Tensor | None = None) -> Doubles:
    floor_F = _min_p_floor(_as_doubles(logits_FV.amax(-1)), filters)
    return np.full(len(logits_FV), -np.inf) if floor_F is None else floor_F


def _bounded(logits_FV: torch.Tensor, filters: FilterRows, _scratch: torch.Tensor | None = None) -> Doubles:
    """Rows with top-k: everything happens within the k largest logits."""
    top_FM = _as_doubles(top_values(logits_FV, int(filters.top_k.max())))
    threshold_F = top_FM[np.arange(len(top_FM)), filters.top_k - 1]
    floor_F = _min_p_floor(top_FM[:, 0], filters)
    if floor_F is not None:
        threshold_F = np.maximum(floor_F, threshold_F)
    if (filters.top_p >= 1).all():
        return threshold_F
    within = (np.arange(top_FM.shape[1]) < filters.top_k[:, None]) & (top_FM >= threshold_F[:, None])
    mass_FM = np.cumsum(_weights(top_FM, filters) * within, axis=1)
    return np.maximum(threshold_F, _cut(top_FM, mass_FM, mass_FM[:, -1], filters))


def _nucleus(logits_FV: torch.Tensor, filters: FilterRows, scratch_FV: torch.Tensor) -> Doubles:
    """Rows with top-p and no top-k: the mass is the whole row's; the cut is looked for among the largest logits, and
    where it lies deeper (flat distributions) in the sorted row."""
    top_FM = _as_doubles(top_values(logits_FV, min(CANDIDATES, logits_FV.shape[1])))
    floor_F = _min_p_floor(top_FM[:, 0], filters)
    total_F = _total_mass(logits_FV, top_FM[:, 0], floor_F, filters, scratch_FV)
    cut_F, is_found_F = _search(top_FM, floor_F, total_F, filters)
    for row in np.flatnonzero(~is_found_F):
        one = slice(row, row + 1)
        sorted_1V = np.sort(logits_FV[row].cpu().numpy())[None, ::-1].astype(np.float64)
        floor_1 = None if floor_F is None else floor_F[one]
        cut_F[one] = _search(sorted_1V, floor_1, total_F[one], filters.pick(np.array([row])))[0]
    return cut_F if floor_F is None else np.maximum(cut_F, floor_F)


def _search(
    top_FM: Doubles, floor_F: Doubles | None, total_F: Doubles, filters: FilterRows
) -> tuple[Doubles, npt.NDArray[np.bool_]]:
    """(cut, whether it lies among these largest logits) of each row."""
    weights_FM = _weights(top_FM, filters)
    if floor_F is not None:
        weights_FM *= top_FM >= floor_F[:, None]
    mass_FM = np.cumsum(weights_FM, axis=1)
    return _cut(top_FM, mass_FM, total_F, filters), mass_FM[:, -1] >= filters.top_p * total_F


def _weights(top_FM: Doubles, filters: FilterRows) -> Doubles:
    """Unnormalised probabilities, 1 for the largest."""
    return np.exp((top_FM - top_FM[:, :1]) * filters.inverse_temperature[:, None])


def _cut(top_FM: Doubles, mass_FM: Doubles, total_F: Doubles, filters: FilterRows) -> Doubles:
    """The logit at which the cumulated mass first reaches top_p of the total (the last one where rounding hides it)."""
    needed_F = filters.top_p * total_F
    index_F = np.minimum((mass_FM < needed_F[:, None]).sum(1), mass_FM.shape[1] - 1)
    cut_F = top_FM[np.arange(len(top_FM)), index_F]
    return np.where(filters.top_p >= 1, -np.inf, cut_F)


def _total_mass(
    logits_FV: torch.Tensor,
    largest_F: Doubles,
    floor_F: Doubles | None,
    filters: FilterRows,
    scratch_FV: torch.Tensor,
) -> Doubles:
    """Sum of the unnormalised probabilities of each whole row, without what min-p drops."""
    device = logits_FV.device
    largest = torch.from_numpy(largest_F.astype(np.float32)).to(device)
    inverse = torch.from_numpy(np.ascontiguousarray(filters.inverse_temperature)).to(device)
    weights_FV = torch.sub(logits_FV, largest[:, None], out=scratch_FV).mul_(inverse[:, None]).exp_()
    if floor_F is not None:
        floor = torch.from_numpy(floor_F.astype(np.float32)).to(device)
        weights_FV.masked_fill_(logits_FV < floor[:, None], 0.0)
    parts = logits_FV.shape[1] // SUM_PARTS * SUM_PARTS
    total_F = weights_FV[:, :parts].unflatten(1, (SUM_PARTS, -1)).sum(-1).double().sum(-1)
    return (total_F + weights_FV[:, parts:].double().sum(-1)).cpu().numpy()
