"""Reference of what changes single logits: penalties for tokens seen, static edits, allowed tokens.

Legend: S rows, V vocabulary, X slots of a table, C seen tokens a slot, E edits a slot, W words of 32 tokens.
"""

import torch
from torch import Tensor

from quire.kernels.registry import kernel


@kernel("penalize", platform="any")
def penalize(
    logits_SV, slots_S, repetition_S, frequency_S, presence_S, seen_ids_XC, seen_counts_XC, seen_sizes_X, longest
) -> None:
    rows = torch.arange(len(slots_S), device=logits_SV.device)
    slots = slots_S.long().clamp(min=0)
    ids_SC, counts_SC = seen_ids_XC[slots, :longest], seen_counts_XC[slots, :longest].float()
    place_C = torch.arange(ids_SC.shape[1], device=logits_SV.device)
    is_seen_SC = (place_C < seen_sizes_X[slots][:, None]) & (slots_S >= 0)[:, None]
    ids_SC = torch.where(is_seen_SC, ids_SC, 0).long()
    values_SC = logits_SV[rows[:, None], ids_SC]
    subtract_SC = frequency_S[:, None] * counts_SC + presence_S[:, None] * (counts_SC > 0)
    factor_SC = repetition_S[:, None]
    penalised_SC = torch.where(values_SC > 0, values_SC / factor_SC, values_SC * factor_SC) - subtract_SC
    where = is_seen_SC.nonzero(as_tuple=True)
    logits_SV[where[0], ids_SC[where]] = penalised_SC[where]


@kernel("count_tokens", platform="any")
def count_tokens(token_ids_S, slots_S, seen_ids_XC, seen_counts_XC, seen_sizes_X) -> None:
    for token, slot in zip(token_ids_S.tolist(), slots_S.tolist(), strict=True):
        if slot < 0:
            continue
        size = int(seen_sizes_X[slot])
        found = (seen_ids_XC[slot, :size] == token).nonzero()
        place = int(found[0]) if len(found) else size
        if place == size:
            seen_ids_XC[slot, place], seen_counts_XC[slot, place] = token, 0
            seen_sizes_X[slot] += 1
        seen_counts_XC[slot, place] += 1


@kernel("edit_logits", platform="any")
def edit_logits(logits_SV, slots_S, positions_S, edit_ids_XE, edit_values_XE, edit_until_XE) -> None:
    slots = slots_S.long().clamp(min=0)
    ids_SE = edit_ids_XE[slots].long()
    is_edit_SE = (ids_SE >= 0) & (slots_S >= 0)[:, None]
    rows, places = is_edit_SE.nonzero(as_tuple=True)
    ids = ids_SE[rows, places]
    is_hidden = positions_S[rows] < edit_until_XE[slots[rows], places]
    edited = logits_SV[rows, ids] + edit_values_XE[slots[rows], places]
    logits_SV[rows, ids] = torch.where(is_hidden, -torch.inf, edited)


@kernel("keep_allowed", platform="any")
def keep_allowed(logits_SV: Tensor, slots_S: Tensor, allowed_XW: Tensor) -> None:
    token_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    words_SV = allowed_XW[slots_S.long().clamp(min=0)][:, token_V // 32]
    is_allowed_SV = ((words_SV >> (token_V % 32)) & 1).bool() | (slots_S < 0)[:, None]
    logits_SV.masked_fill_(~is_allowed_SV, -torch.inf)
