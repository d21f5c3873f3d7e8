"""Sampling on a CPU: draws on the native library; filters as one threshold a row, and logprobs, of the largest logits only.

The vocabulary is not sorted: most of the time goes into a few passes over the logits. Top-k, top-p and min-p together are
a single cut of the descending order, as `kernels/sampling.py` defines it.

Legend: S rows, F rows that filter, N rows that want logprobs, V vocabulary, M largest logits looked at, C columns of a
folded view.
"""

import dataclasses
import threading

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.binding import address, cpu_kernel, float_address, run

CANDIDATES = 128
"""Largest logits looked at for top-p before the whole row is sorted; most nuclei of a trained model are smaller."""
FOLD = 16
"""How many logits share a column of the folded view. For 50 of 32,000 both searches then cost the same (Zen 3)."""
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


@cpu_kernel("filtered_gumbel_argmax")
def filtered_gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    threshold_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    filters = FilterRows(inverse_temperature_S.numpy(), top_k_S.numpy(), top_p_S.numpy(), min_p_S.numpy())
    is_bounded_S = (filters.top_k > 0) & (filters.top_k < logits_SV.shape[1])
    filters_S = np.isfinite(filters.inverse_temperature) & (is_bounded_S | (filters.top_p < 1) | (filters.min_p > 0))
    scratch_SV = _scratch(logits_SV)
    if filters_S.all():
        threshold_S.copy_(compute_thresholds(logits_SV, filters, scratch_SV))
    else:
        index = np.flatnonzero(filters_S)
        index_F = torch.from_numpy(index)
        threshold_S.fill_(-torch.inf)
        threshold_S[index_F] = compute_thresholds(logits_SV[index_F], filters.pick(index), scratch_SV[: len(index)])
    _keep_from(logits_SV, threshold_S, scratch_SV)
    gumbel_argmax(scratch_SV, inverse_temperature_S, seed_S, position_S, out_S)


@cpu_kernel("hide_below")
def hide_below(logits_SV: torch.Tensor, threshold_S: torch.Tensor) -> None:
    _keep_from(logits_SV, threshold_S, logits_SV)


def _keep_from(logits_SV: torch.Tensor, threshold_S: torch.Tensor, out_SV: torch.Tensor) -> None:
    """Copy logits that are at least their row's threshold; the others become minus infinity."""
    # `threshold` keeps what is larger than its bound and takes one pass without a temporary; a mask takes four times as long.
    bounds = torch.nextafter(threshold_S, torch.tensor(-torch.inf)).tolist()
    for logits_V, bound, out_V in zip(logits_SV, bounds, out_SV, strict=True):
        torch.threshold(logits_V, bound, -torch.inf, out=out_V)


_kept = threading.local()


def _scratch(logits_SV: torch.Tensor) -> torch.Tensor:
    """Room for as many logits; kept for each thread, because the first touch of fresh memory costs more than its use."""
    values = getattr(_kept, "values", None)
    if values is None or len(values) < logits_SV.numel():
        values = _kept.values = torch.empty(logits_SV.numel(), dtype=torch.float32)
    return values[: logits_SV.numel()].view_as(logits_SV)


@cpu_kernel("token_logprobs")
def token_logprobs(
    logits_SV: torch.Tensor,
    index_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    normalize: bool,
    values_NK: torch.Tensor,
    ids_NK: torch.Tensor,
    ranks_N: torch.Tensor,
) -> None:
    logits_NV = logits_SV if _are_all(index_N, len(logits_SV)) else logits_SV[index_N.long()]
    ids_NK[:, 0] = token_ids_N
    count = ids_NK.shape[1] - 1
    if count:
        ids_NK[:, 1:] = torch.topk(logits_NV, count, dim=-1).indices
    torch.gather(logits_NV, 1, ids_NK.long(), out=values_NK)
    ranks_N.copy_((logits_NV > values_NK[:, :1]).sum(-1) + 1)
    if normalize:
        values_NK -= torch.logsumexp(logits_NV, dim=-1, keepdim=True)


@cpu_kernel("penalize")
def penalize(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    repetition_S: torch.Tensor,
    frequency_S: torch.Tensor,
    presence_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
    longest: int,
) -> None:
    slots = slots_S.numpy()
    rows = np.flatnonzero(slots >= 0)
    slots = slots[rows]
    sizes = seen_sizes_X.numpy()[slots]
    entry_N = _ranges(slots.astype(np.intp) * seen_ids_XC.shape[1], sizes)
    ids_N, counts_N = _flat(seen_ids_XC)[entry_N], _flat(seen_counts_XC)[entry_N]
    logits = logits_SV.numpy().reshape(-1)
    where_N = np.repeat(rows * logits_SV.shape[1], sizes) + ids_N
    factor_N, frequency_N, presence_N = (
        np.repeat(values_S.numpy()[rows], sizes) for values_S in (repetition_S, frequency_S, presence_S)
    )
    values_N = logits[where_N]
    penalised_N = np.where(values_N > 0, values_N / factor_N, values_N * factor_N)
    logits[where_N] = penalised_N - (frequency_N * counts_N.astype(np.float32) + presence_N * (counts_N > 0))


@cpu_kernel("count_tokens")
def count_tokens(
    token_ids_S: torch.Tensor,
    slots_S: torch.Tensor,
    seen_ids_XC: torch.Tensor,
    seen_counts_XC: torch.Tensor,
    seen_sizes_X: torch.Tensor,
) -> None:
    slots = slots_S.numpy()
    rows = np.flatnonzero(slots >= 0)
    ids_XC, counts_XC, sizes_X = seen_ids_XC.numpy(), seen_counts_XC.numpy(), seen_sizes_X.numpy()
    for token, slot in zip(token_ids_S.numpy()[rows].tolist(), slots[rows].tolist(), strict=True):
        size = int(sizes_X[slot])
        found = np.flatnonzero(ids_XC[slot, :size] == token)
        if len(found):
            counts_XC[slot, found[0]] += 1
        else:
            ids_XC[slot, size], counts_XC[slot, size], sizes_X[slot] = token, 1, size + 1


@cpu_kernel("edit_logits")
def edit_logits(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    edit_ids_XE: torch.Tensor,
    edit_values_XE: torch.Tensor,
    edit_until_XE: torch.Tensor,
) -> None:
    slots = slots_S.numpy()
    rows = np.flatnonzero(slots >= 0)
    ids_NE = edit_ids_XE.numpy()[slots[rows]]
    numbers, places = np.nonzero(ids_NE >= 0)
    ids, slots, rows = ids_NE[numbers, places], slots[rows][numbers], rows[numbers]
    logits = logits_SV.numpy()
    edited = logits[rows, ids] + edit_values_XE.numpy()[slots, places]
    is_hidden = positions_S.numpy()[rows] < edit_until_XE.numpy()[slots, places]
    logits[rows, ids] = np.where(is_hidden, np.float32(-np.inf), edited)


def _flat(table_XC: torch.Tensor) -> npt.NDArray[np.int32]:
    """A contiguous table's entries, one slot after the other."""
    return table_XC.numpy().reshape(-1)


def _ranges(first_N: npt.NDArray[np.intp], sizes_N: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    """`first`, `first + 1` …, so many of each, one after the other."""
    ends_N = np.cumsum(sizes_N)
    return np.arange(ends_N[-1] if len(ends_N) else 0) + np.repeat(first_N - (ends_N - sizes_N), sizes_N)


def _are_all(index_N: torch.Tensor, count: int) -> bool:
    """Whether the index names every row in order."""
    index = index_N.numpy()
    return len(index) == count and bool((index == np.arange(count)).all())


def top_values(logits_FV: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row in descending order, [F, count]. Exact.

    The vocabulary is folded into columns of `FOLD` logits. The M largest logits lie in the M columns with the largest
    maxima (or are equal to one that does), so only those columns are searched: one pass over the logits finds the maxima.
    """
    rows, vocabulary = logits_FV.shape
    columns = vocabulary // FOLD
    if count * 4 > columns:
        return torch.topk(logits_FV, min(count, vocabulary), dim=-1).values
    folded = logits_FV[:, : columns * FOLD].unflatten(1, (FOLD, columns))
    best_FM = torch.topk(folded.amax(1), count, dim=-1, sorted=False).indices
    candidates = folded.gather(2, best_FM[:, None, :].expand(rows, FOLD, count)).flatten(1)
    if columns * FOLD < vocabulary:
        candidates = torch.cat((candidates, logits_FV[:, columns * FOLD :]), dim=1)
    return torch.topk(candidates, count, dim=-1).values


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


@cpu_kernel("argmax")
def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    call = native.ArgmaxArguments(
        float_address(logits_SV, "logits"), None, None, None, None, None, address(out_S, torch.int32, "out"),
        logits_SV.shape[-1], 0,
    )  # fmt: skip
    run("argmax", call, logits_SV.shape[0], logits_SV, out_S)


@cpu_kernel("gumbel_argmax")
def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    _draw(logits_SV, None, None, inverse_temperature_S, seed_S, position_S, out_S)


@cpu_kernel("allowed_gumbel_argmax")
def allowed_gumbel_argmax(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    allowed_XW: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    _draw(logits_SV, slots_S, allowed_XW, inverse_temperature_S, seed_S, position_S, out_S)


def _draw(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor | None,
    allowed_XW: torch.Tensor | None,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """Gumbel-max of what the rows' masks allow; None: of everything."""
    position_S = position_S.long()
    call = native.ArgmaxArguments(
        float_address(logits_SV, "logits"),
        float_address(inverse_temperature_S, "inverse_temperature"),
        address(seed_S, torch.int64, "seed"),
        address(position_S, torch.int64, "position"),
        None if slots_S is None else address(slots_S, torch.int32, "slots"),
        None if allowed_XW is None else address(allowed_XW, torch.int32, "allowed"),
        address(out_S, torch.int32, "out"),
        logits_SV.shape[-1],
        0 if allowed_XW is None else allowed_XW.shape[1],
    )
    tensors = (logits_SV, slots_S, allowed_XW, inverse_temperature_S, seed_S, position_S, out_S)
    run("argmax", call, logits_SV.shape[0], *tensors)


@cpu_kernel("keep_allowed")
def keep_allowed(logits_SV: torch.Tensor, slots_S: torch.Tensor, allowed_XW: torch.Tensor) -> None:
    call = native.KeepAllowedArguments(
        float_address(logits_SV, "logits"),
        address(slots_S, torch.int32, "slots"),
        address(allowed_XW, torch.int32, "allowed"),
        logits_SV.shape[1],
        allowed_XW.shape[1],
    )
    run("keep_allowed", call, logits_SV.shape[0], logits_SV, slots_S, allowed_XW)
