"""Presence, frequency and repetition penalties, applied only to the tokens that a row has seen.

A row's distinct tokens and their output counts are kept as they come, so that a step costs the distinct tokens of the
rows that are penalised, not the vocabulary.

Legend: S rows of the batch, V vocabulary, N seen tokens of all penalised rows.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.sampling_params import SamplingParams


class SeenTokens:
    """The distinct tokens of one row's prompt and output, with how often each was generated."""

    def __init__(self, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.repetition = params.repetition_penalty
        # Only the repetition penalty looks at the prompt.
        known = dict.fromkeys(prompt_token_ids if self.repetition != 1.0 else ())
        known.update(dict.fromkeys(output_token_ids))
        self._slot_of = {token: slot for slot, token in enumerate(known)}
        self._size = len(known)
        capacity = max(64, 2 * self._size)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: self._size] = list(known)
        for token in output_token_ids:
            self._counts[self._slot_of[token]] += 1

    def append(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._slot_of[token] = slot
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each was generated (0: only in the prompt)."""
        return self._counts[: self._size]


def apply_penalties(logits_SV: torch.Tensor, seen: list[tuple[int, SeenTokens]]) -> None:
    """Penalise in place; `seen` holds (index in the batch, tokens). Logits are contiguous.

    Repetition divides positive logits and multiplies negative ones (Keskar et al., CTRL); frequency subtracts its value
    for each time a token was generated, presence once.
    """
    sizes = [len(tokens.ids) for _, tokens in seen]
    if not sum(sizes):
        return
    vocabulary, device = logits_SV.shape[1], logits_SV.device
    index_N = torch.from_numpy(np.concatenate([tokens.ids + index * vocabulary for index, tokens in seen])).to(device)
    counts_N = np.concatenate([tokens.counts for _, tokens in seen])
    repetition_N = np.repeat(np.array([tokens.repetition for _, tokens in seen], dtype=np.float32), sizes)
    frequency_N = np.repeat(np.array([tokens.frequency for _, tokens in seen], dtype=np.float32), sizes)
    presence_N = np.repeat(np.array([tokens.presence for _, tokens in seen], dtype=np.float32), sizes)
    subtract_N = torch.from_numpy(frequency_N * counts_N + presence_N * (counts_N > 0)).to(device)
    factor_N = torch.from_numpy(repetition_N).to(device)
    flat = logits_SV.view(-1)
    values_N = flat[index_N]
    flat[index_N] = torch.where(values_N > 0, values_N / factor_N, values_N * factor_N) - subtract_N
