"""How a drafter draws its guesses, and what it drew them from.

1. With the row's temperature and filters and the noise that the model will draw with at that place: where both agree in their
   probabilities they draw the same token, and the guess is accepted by equality. The row's tokens do not depend on guesses.
2. `greedy`: the likeliest token.
3. `probabilistic`: with noise of its own. The probabilities are kept until the guesses are verified, and
   `spec_decode/rejection.py` accepts as many as can be; the row's tokens depend on guesses.

Legend: N rows, V the model's vocabulary, K drafts.
"""

import torch

from quire.config.speculative import SpeculativeConfig
from quire.core.output import IntArray
from quire.kernels import ops
from quire.worker.draft_batch import DraftBatch

_DRAFTS = 0x3C6EF372FE94F82B
"""Makes another seed of a row's."""


class DraftDrawing:
    """Draws for one drafter.

    Args:
        most: guesses of a row at most.
        known: leading tokens of the vocabulary that the drafter has.
    """

    def __init__(
        self, config: SpeculativeConfig, most: int, max_rows: int, vocab: int, known: int, device: torch.device
    ) -> None:
        self._is_greedy, self._keeps = config.draft_sample_method == "greedy", config.is_probabilistic
        self._known = known
        self._threshold_N = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._never_N = torch.full((max_rows,), torch.inf, device=device)
        self._q_KNV = torch.zeros((most, max_rows, vocab) if self._keeps else 0, dtype=torch.float32, device=device)
        self._place_of: dict[int, int] = {}

    @property
    def buffer_bytes(self) -> int:
        """Of the probabilities that are kept."""
        return self._q_KNV.nbytes

    def draw(self, batch: DraftBatch, logits_NV: torch.Tensor, number: int, *, is_filtered: bool) -> torch.Tensor:
        """Draw each row's guess of this number (int32), with the noise of the position that was placed. Logits may change."""
        columns, count = batch.columns, len(logits_NV)
        out_N = batch.drafts_KN[number, :count]
        inverse_N = (self._never_N if self._is_greedy else columns.inverse_temperature_S)[:count]
        seed_N = columns.seed_S[:count] ^ _DRAFTS if self._keeps else columns.seed_S[:count]
        if self._keeps and logits_NV.shape[1] > self._known:
            logits_NV = logits_NV[:, : self._known].contiguous()
        noise = (seed_N, columns.positions_S[:count])
        if is_filtered and not self._is_greedy:
            top_k, top_p, min_p = (column[:count] for column in (columns.top_k_S, columns.top_p_S, columns.min_p_S))
            threshold_N = self._threshold_N[:count]
            ops.filtered_gumbel_argmax(logits_NV, inverse_N, top_k, top_p, min_p, *noise, threshold_N, out_N)
        else:
            ops.gumbel_argmax(logits_NV, inverse_N, *noise, out_N)
        if self._keeps:
            self._keep(logits_NV, inverse_N, number, is_filtered=is_filtered)
        return out_N.clamp_(0, self._known - 1)

    def _keep(self, logits_NV: torch.Tensor, inverse_N: torch.Tensor, number: int, *, is_filtered: bool) -> None:
        """What the guesses were drawn from; of greedy rows, which are verified by equality, something else."""
        count, width = logits_NV.shape
        chosen_NV = logits_NV.float()
        if is_filtered:
            chosen_NV = chosen_NV.clone()
            ops.hide_below(chosen_NV, self._threshold_N[:count])
        scale_N = torch.where(torch.isinf(inverse_N), 1.0, inverse_N)
        self._q_KNV[number, :count, :width] = torch.softmax(chosen_NV * scale_N[:, None], -1)

    def told(self, rows: IntArray) -> None:
        """The guesses of these rows, in this order, were the last ones."""
        self._place_of = {row: place for place, row in enumerate(rows.tolist())} if self._keeps else {}

    def probabilities(self, row: int, count: int) -> torch.Tensor | None:
        """What the row's first so many guesses were drawn from: [count, V]; None where they are kept no more."""
        place = self._place_of.get(row)
        return None if place is None else self._q_KNV[:count, place]
