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

FIRST_CANDIDATES = 128
"""Largest logits looked at first for top-p; nearly every nucleus of a trained model is smaller."""
GROWTH = 8
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


def compute_thresholds(logits_FV: torch.Tensor, filters: FilterRows) -> torch.Tensor:
    """The smallest logit of each row that may be drawn, float32 [F]."""
    vocabulary = logits_FV.shape[1]
    thresholds = np.full(len(filters.top_k), -np.inf)
    bounded = (filters.top_k > 0) & (filters.top_k < vocabulary)
    nucleus = ~bounded & (filters.top_p < 1)
    only_min_p = ~bounded & ~nucleus
    for members, compute in ((bounded, _bounded), (nucleus, _nucleus), (only_min_p, _only_min_p)):
        index = np.flatnonzero(members)
        if len(index) == len(members):
            return torch.from_numpy(compute(logits_FV, filters).astype(np.float32)).to(logits_FV.device)
        if len(index):
            chosen = logits_FV[torch.from_numpy(index).to(logits_FV.device)]
            thresholds[index] = compute(chosen, filters.pick(index))
    return torch.from_numpy(thresholds.astype(np.float32)).to(logits_FV.device)


def _min_p_floor(largest_F: Doubles, filters: FilterRows) -> Doubles:
    """Logits below this have less than min_p times the largest probability."""
    with np.errstate(divide="ignore"):
        return largest_F + np.log(filters.min_p.astype(np.float64)) / filters.inverse_temperature


def _only_min_p(logits_FV: torch.Tensor, filters: FilterRows) -> Doubles:
    return _min_p_floor(logits_FV.amax(-1).double().cpu().numpy(), filters)


def _bounded(logits_FV: torch.Tensor, filters: FilterRows) -> Doubles:
    """Rows with top-k: everything happens within the k largest logits."""
    top_FM = top_values(logits_FV, int(filters.top_k.max())).double().cpu().numpy()
    floor_F = _min_p_floor(top_FM[:, 0], filters)
    kth_F = top_FM[np.arange(len(top_FM)), filters.top_k - 1]
    threshold_F = np.maximum(floor_F, kth_F)
    if (filters.top_p >= 1).all():
        return threshold_F
    within = (np.arange(top_FM.shape[1]) < filters.top_k[:, None]) & (top_FM >= threshold_F[:, None])
    mass_FM = np.cumsum(_weights(top_FM, filters) * within, axis=1)
    cut_F = _cut(top_FM, mass_FM, mass_FM[:, -1], filters)
    return np.maximum(threshold_F, cut_F)


def _nucleus(logits_FV: torch.Tensor, filters: FilterRows) -> Doubles:
    """Rows with top-p and no top-k: the mass is the whole row's; the cut is looked for among the largest logits."""
    vocabulary = logits_FV.shape[1]
    count = min(FIRST_CANDIDATES, vocabulary)
    top_FM = top_values(logits_FV, count).double().cpu().numpy()
    floor_F = _min_p_floor(top_FM[:, 0], filters)
    total_F = _total_mass(logits_FV, top_FM[:, 0], floor_F, filters)
    cut_F = np.full(len(total_F), -np.inf)
    index = np.arange(len(total_F))
    while True:
        chosen = filters.pick(index)
        weights = _weights(top_FM, chosen) * (top_FM >= floor_F[index, None])
        mass_FM = np.cumsum(weights, axis=1)
        is_found = (mass_FM[:, -1] >= chosen.top_p * total_F[index]) | (count >= vocabulary)
        cut_F[index] = np.where(is_found, _cut(top_FM, mass_FM, total_F[index], chosen), -np.inf)
        index = index[~is_found]
        if not len(index):
            return np.maximum(cut_F, floor_F)
        count = min(count * GROWTH, vocabulary)
        top_FM = top_values(logits_FV[torch.from_numpy(index).to(logits_FV.device)], count).double().cpu().numpy()


def _weights(top_FM: Doubles, filters: FilterRows) -> Doubles:
    """Unnormalised probabilities, 1 for the largest."""
    return np.exp((top_FM - top_FM[:, :1]) * filters.inverse_temperature[:, None])


def _cut(top_FM: Doubles, mass_FM: Doubles, total_F: Doubles, filters: FilterRows) -> Doubles:
    """The logit at which the cumulated mass first reaches top_p of the total (the last one where rounding hides it)."""
    needed_F = filters.top_p * total_F
    index_F = np.minimum((mass_FM < needed_F[:, None]).sum(1), mass_FM.shape[1] - 1)
    cut_F = top_FM[np.arange(len(top_FM)), index_F]
    return np.where(filters.top_p >= 1, -np.inf, cut_F)


def _total_mass(logits_FV: torch.Tensor, largest_F: Doubles, floor_F: Doubles, filters: FilterRows) -> Doubles:
    """Sum of the unnormalised probabilities of each whole row, without what min-p drops."""
    device = logits_FV.device
    largest = torch.from_numpy(largest_F.astype(np.float32)).to(device)
    inverse = torch.from_numpy(np.ascontiguousarray(filters.inverse_temperature)).to(device)
    weights_FV = torch.sub(logits_FV, largest[:, None]).mul_(inverse[:, None]).exp_()
    if np.isfinite(floor_F).any():
        floor = torch.from_numpy(floor_F.astype(np.float32)).to(device)
        weights_FV.masked_fill_(logits_FV < floor[:, None], 0.0)
    parts = logits_FV.shape[1] // SUM_PARTS * SUM_PARTS
    total_F = weights_FV[:, :parts].unflatten(1, (SUM_PARTS, -1)).sum(-1).double().sum(-1)
    return (total_F + weights_FV[:, parts:].double().sum(-1)).cpu().numpy()
