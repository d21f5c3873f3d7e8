"""Tokens on their way to the ranks that have their experts, and what these give on its way back: `--all2all-backend`.

Every rank brings tokens of its own, as many as it has. Knows tokens, who has which expert, and the communicator; knows neither
layers nor how experts are computed.
Legend: M tokens of this rank, S of them on their way (one for each rank that a token needs), R received tokens, D hidden, E
experts, K experts a token, N ranks.
"""

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.config.engine import TOKEN_EXCHANGES, ParallelConfig, exchanges_tokens
from quire.distributed.communicator import Communicator

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From tokens [R, D], their experts and weights [R, K], to what this rank's own experts give [R, D]; R is not 0."""


class TokenExchange(abc.ABC):
    """How tokens get to experts of other ranks; one for all layers of a model.

    Args:
        communicator: the ranks. All of them call `run` for every layer, also without tokens.

    Attributes:
        most: tokens that any rank brings to a layer of this step, at most; set where copies exchange, before the step.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.most = communicator, 0

    @abc.abstractmethod
    def run(
        self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, owners_E: Tensor, experts: Experts, out_MD: Tensor
    ) -> None:
        """out = of each token, what the experts of all ranks give together. It is neither recorded nor captured.

        Args:
            ids_MK, weights_MK: int32 and float32, as `ops.moe_route` gives them.
            owners_E: int64; who has each expert; the number of ranks: nobody.
            experts: computes what other ranks, and this one, have sent here.
        """


class AllToAll(TokenExchange):
    """Each token goes once to each rank that it needs, through the communicator's `all_to_all`; the host reads how many do."""

    def run(
        self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, owners_E: Tensor, experts: Experts, out_MD: Tensor
    ) -> None:
        ranks = self.communicator
        wanted_NM = torch.zeros(ranks.size + 1, len(x_MD), dtype=torch.bool, device=x_MD.device)
        wanted_NM.scatter_(0, owners_E[ids_MK.long()].T, True)
        wanted_NM = wanted_NM[:-1]  # the last row is of experts that nobody has
        sent_N = wanted_NM.sum(1)
        came_N = torch.zeros_like(sent_N)
        came_N[ranks.rank] = len(x_MD)  # of a silent rehearsal
        ranks.all_to_all(sent_N, [1] * ranks.size, came_N, [1] * ranks.size)
        sent, came, tokens_S = sent_N.tolist(), came_N.tolist(), wanted_NM.nonzero()[:, 1]
        received = [self._bring(each[tokens_S], sent, came) for each in (x_MD, ids_MK, weights_MK)]
        given_RD = experts(*received) if sum(came) else received[0]
        back_SD = self._bring(given_RD, came, sent)
        sum_MD = torch.zeros(x_MD.shape, dtype=torch.float32, device=x_MD.device)
        for tokens, back in zip(tokens_S.split(sent), back_SD.split(sent), strict=True):  # always in the order of ranks
            sum_MD[tokens] += back
        out_MD.copy_(sum_MD)

    def _bring(self, tensor: Tensor, counts: Sequence[int], out_counts: Sequence[int]) -> Tensor:
        out = tensor.new_zeros(sum(out_counts), tensor.shape[1])
        self.communicator.all_to_all(tensor, counts, out, out_counts)
        return out


class GatherAll(TokenExchange):
    """Every rank gets all tokens, computes its own experts for them, and gives each rank the parts of its tokens. Where ranks are
    few that is little more than what `AllToAll` sends, and nothing waits for the host, which knows `most`.

    Small steps take as long as the host needs to launch what they consist of: so a token travels with its choices in one row of
    W numbers, first the experts, then the weights, then its values.
    """

    def run(
        self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor, owners_E: Tensor, experts: Experts, out_MD: Tensor
    ) -> None:
        ranks, top_k, width = self.communicator, ids_MK.shape[1], x_MD.shape[1]
        rows = len(x_MD) if ranks.is_silent else self.most
        count = min(len(x_MD), rows)  # what a step's shape has behind its tokens is not sent
        all_NMW = ids_MK.new_empty(ranks.size, rows, 2 * top_k + -(-width * x_MD.itemsize // 4))
        if ranks.is_silent:
            all_NMW.zero_()
        mine_MW = all_NMW[ranks.rank]
        mine_MW[:count, :top_k] = ids_MK[:count]
        mine_MW[:count, top_k : 2 * top_k] = weights_MK[:count].view(torch.int32)
        mine_MW[:count, 2 * top_k :].view(x_MD.dtype)[:, :width] = x_MD[:count]
        if count < rows:
            mine_MW[count:, :top_k] = len(owners_E)
        ranks.all_gather(mine_MW, all_NMW)
        all_RW = all_NMW.flatten(0, 1)
        ids_RK, weights_RK = all_RW[:, : 2 * top_k].unflatten(1, (2, top_k)).transpose(0, 1).contiguous()
        x_RD = all_RW[:, 2 * top_k :].view(x_MD.dtype)[:, :width].contiguous()
        given_RD = experts(x_RD, ids_RK, weights_RK.view(torch.float32)) if len(x_RD) else x_RD
        back_RD, counts = given_RD if ranks.is_silent else torch.empty_like(given_RD), [rows] * ranks.size
        ranks.all_to_all(given_RD, counts, back_RD, counts)
        torch.sum(back_RD.unflatten(0, (ranks.size, rows))[:, :count], 0, out=out_MD[:count])
        if count < len(out_MD):
            out_MD[count:] = 0


def open_exchange(parallel: ParallelConfig, communicator: Communicator) -> TokenExchange | None:
    """What `all2all_backend` names; None where tokens stay where they are. Raises ConfigError: it is no `TokenExchange`."""
    backend = parallel.all2all_backend
    if communicator.copies is not None:  # no rank has all tokens
        communicator = communicator.copies
        if not exchanges_tokens(backend):
            return GatherAll(communicator)
    if communicator.size == 1 or not exchanges_tokens(backend):
        return None
    return TOKEN_EXCHANGES.find_class(backend, TokenExchange)(communicator)
