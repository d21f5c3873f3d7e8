"""Sampling on a CPU: draws and filters on the native library, the edits of single logits and logprobs on numpy and PyTorch.

Legend: S rows, N rows that want logprobs, V vocabulary, X slots of a table.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu.binding import Operation, cpu_kernel

_ARGMAX = Operation(
    "argmax",
    "logits inverse_temperature seed:long position:long slots:int allowed:int threshold out:int",
    longs="v words",
)
_THRESHOLDS = Operation("thresholds", "logits inverse_temperature top_k:int top_p min_p out", longs="v")
_KEEP_ALLOWED = Operation("keep_allowed", "logits slots:int allowed:int", longs="v words")


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
    filters = {"top_k": top_k_S, "top_p": top_p_S, "min_p": min_p_S, "inverse_temperature": inverse_temperature_S}
    _THRESHOLDS(len(logits_SV), logits=logits_SV, **filters, out=threshold_S, v=logits_SV.shape[1])
    _draw(logits_SV, None, None, threshold_S, inverse_temperature_S, seed_S, position_S, out_S)


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


@cpu_kernel("argmax")
def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    _ARGMAX(len(logits_SV), logits=logits_SV, out=out_S, v=logits_SV.shape[-1])


@cpu_kernel("gumbel_argmax")
def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    _draw(logits_SV, None, None, None, inverse_temperature_S, seed_S, position_S, out_S)


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
    _draw(logits_SV, slots_S, allowed_XW, None, inverse_temperature_S, seed_S, position_S, out_S)


def _draw(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor | None,
    allowed_XW: torch.Tensor | None,
    threshold_S: torch.Tensor | None,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """Gumbel-max of what the rows' masks allow and of logits of at least their threshold; None: of everything."""
    _ARGMAX(
        len(logits_SV),
        logits=logits_SV,
        inverse_temperature=inverse_temperature_S,
        seed=seed_S,
        position=position_S.long(),
        slots=slots_S,
        allowed=allowed_XW,
        threshold=threshold_S,
        out=out_S,
        v=logits_SV.shape[-1],
        words=0 if allowed_XW is None else allowed_XW.shape[1],
    )


@cpu_kernel("keep_allowed")
def keep_allowed(logits_SV: torch.Tensor, slots_S: torch.Tensor, allowed_XW: torch.Tensor) -> None:
    sizes = {"v": logits_SV.shape[1], "words": allowed_XW.shape[1]}
    _KEEP_ALLOWED(len(logits_SV), logits=logits_SV, slots=slots_S, allowed=allowed_XW, **sizes)
