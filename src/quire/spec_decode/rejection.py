"""Rejection sampling: accept drafts more often than by equality, where it is known what they were drawn from.

A draft x that was drawn from q, where the model draws from p, is accepted with chance min(1, p(x) / q(x)); otherwise a token is
drawn from what p has more than q, max(p - q, 0) scaled to 1 (Leviathan et al., 2023; Chen et al., 2023). The tokens' distribution
is p, and a draft is accepted with chance sum(min(p, q)), the most that is possible. Which tokens come depends on the drafts.

A draft without probabilities is certain: q is 1 at x. Then the chance is p(x), which is how often the model's own draw equals x,
and the rest is drawn from p without x, which is what that draw is where it differs. So such drafts are left to equality: it
accepts them equally often, and its tokens do not depend on drafts.

Knows rows, positions and probabilities. Knows nothing of drafters. Chances and redraws have random numbers of their own, by
(seed, position), as all draws. Drafts are to be drawn with others.

Legend: S draws, N draws that have a draft with probabilities, V vocabulary.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels import ops
from quire.kernels.sampling import philox
from quire.kernels.step import SampleColumns

IntArray = npt.NDArray[np.int32]
ProbabilitiesOf = Callable[[int, int], torch.Tensor | None]
"""What the first so many drafts of a row were drawn from: [count, V] of float32 on the device; None where that is not known."""
_CHANCES, _REDRAWS = 0x5DEECE66D1CE4E5B, 0x2545F4914F6CDD1D
"""Make another seed of a row's: 64 bits that mean nothing else."""


class Rejection:
    """Replaces draws of one step at a time (`Sampler.redraw`).

    Attributes:
        probabilities: of a row's drafts.
    """

    def __init__(self) -> None:
        self.probabilities: ProbabilitiesOf = lambda row, count: None
        self._given: dict[int, tuple[int, list[int], torch.Tensor]] = {}

    def begin(self, drafts: Mapping[int, list[int]], first_positions: Mapping[int, int]) -> None:
        """The drafts of the step that is drawn from now on, and where the first one of each row stands."""
        self._given = {}
        for row, guesses in drafts.items():
            q_KV = self.probabilities(row, len(guesses))
            if q_KV is not None:
                self._given[row] = (first_positions[row], guesses, q_KV)

    @property
    def is_on(self) -> bool:
        """Whether the step has drafts with probabilities."""
        return bool(self._given)

    def replace(
        self,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        threshold_S: torch.Tensor | None,
        rows_S: IntArray,
        positions_S: IntArray,
        out_S: torch.Tensor,
    ) -> None:
        """Put drafts that are accepted in the place of draws, and other draws in the place of those that are not.

        The logits are those after all edits; below its threshold nothing of a row was drawn.
        """
        where: list[int] = []
        drafts: list[int] = []
        parts: list[torch.Tensor] = []
        for index, (row, position) in enumerate(zip(rows_S.tolist(), positions_S.tolist(), strict=True)):
            given = self._given.get(row)
            number = position - given[0] if given is not None else 0
            if given is not None and number < len(given[1]):
                where.append(index)
                drafts.append(given[1][number])
                parts.append(given[2][number])
        if not where:
            return
        device = logits_SV.device
        where_N, drafts_N = (torch.tensor(values, device=device) for values in (where, drafts))
        chosen_NV = logits_SV.index_select(0, where_N)
        if threshold_S is not None:
            ops.hide_below(chosen_NV, threshold_S.index_select(0, where_N))
        inverse_N, seed_N = columns.inverse_temperature_S[where_N], columns.seed_S[where_N]
        drawn_N, is_greedy_N = out_S.index_select(0, where_N), torch.isinf(inverse_N)
        p_NV = torch.softmax(chosen_NV * torch.where(is_greedy_N, 1.0, inverse_N)[:, None], -1)
        tokens_N = accept_or_redraw(p_NV, torch.stack(parts), drafts_N, seed_N, columns.positions_S[where_N])
        out_S.index_copy_(0, where_N, torch.where(is_greedy_N, drawn_N, tokens_N))


def accept_or_redraw(
    p_NV: torch.Tensor, q_NV: torch.Tensor, drafts_N: torch.Tensor, seed_N: torch.Tensor, position_N: torch.Tensor
) -> torch.Tensor:
    """Tokens (int32) that follow p, given drafts (int64) that were drawn from q: the draft itself, or another one."""
    word_N = philox(seed_N ^ _CHANCES, position_N, 1)[:, 0]
    chance_N = ((word_N >> 9) * 2 + 1).float() * 2.0**-24
    p_N, q_N = (values.gather(1, drafts_N[:, None])[:, 0] for values in (p_NV, q_NV))
    redrawn_N = torch.empty(len(p_NV), dtype=torch.int32, device=p_NV.device)
    more_NV = torch.log((p_NV - q_NV).clamp(min=0.0))
    ops.gumbel_argmax(more_NV, torch.ones_like(p_N), seed_N ^ _REDRAWS, position_N.int(), redrawn_N)
    return torch.where(chance_N * q_N < p_N, drafts_N.int(), redrawn_N)
