"""Steps of copies that share experts: all copies take each step together, with requests of their own or with none.

A step begins with a word of every rank, which has the number of its tokens, and passes through the experts of each layer: what a
copy's own step leaves out (all of them where it has no tokens, the last ones where none of its tokens needs logits) it computes
for the others.
"""

from collections.abc import Sequence
from typing import cast

import torch

from quire.core.output import Turn
from quire.distributed.communicator import Communicator
from quire.distributed.token_exchange import TokenExchange
from quire.layers.moe import Mixture


class SharedSteps:
    """One rank's part in them. Between two steps nothing is exchanged, as in rehearsals.

    Args:
        ranks: of all copies.
        mixtures: the layers' experts, in order.
    """

    def __init__(self, ranks: Communicator, mixtures: Sequence[Mixture], device: torch.device) -> None:
        self._ranks, self._mixtures = ranks, list(mixtures)
        ranks.is_silent = True
        self._word = torch.zeros(3, dtype=torch.int64, device=device)
        self._words = torch.zeros(ranks.size, 3, dtype=torch.int64, device=device)

    def begin(self, turn: Turn, num_calls: int = 0, num_tokens: int = 0) -> tuple[bool, bool]:
        """A step begins. Returns whether it is one of a copy that computes, and whether this copy may leave behind it: all wait
        for all, or nobody has work, nor was called to work since (`num_calls`, of each copy) unknown to others."""
        self._ranks.is_silent = False
        self._word.copy_(torch.tensor([turn, num_calls, num_tokens]))
        self._ranks.all_gather(self._word, self._words)
        turns, calls, counts = (set(column) for column in self._words.T.tolist())
        for mixture in self._mixtures[:1]:  # all have one exchange
            cast(TokenExchange, mixture.exchange).most = max(counts)
        rests = turns == {Turn.NOTHING} and len(calls) == 1
        return Turn.COMPUTES in turns, rests or turns == {Turn.WAITS_FOR_ALL}

    def finish(self, is_computed: bool) -> None:
        """This copy's layers are computed: take part in those experts that they have left out."""
        for mixture in self._mixtures if is_computed else ():
            mixture.finish_step()
        self._ranks.is_silent = True
