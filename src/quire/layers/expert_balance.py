"""Expert parallelism load balancing: busy experts get copies on other ranks, and all move to where the load is even.

A rank has *places* for experts, the same number as each other rank; an expert has one or more of all places. Tokens of an expert
with several are dealt over them in turn. Loads are counted step by step; every so many steps the places are dealt anew, and
weights move, one layer between two steps. Every rank counts the same and decides the same.

Legend: T tokens, E experts, K experts a token, M the most places of an expert.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.communicator import Communicator
from quire.layers.parallel import ParallelPlan

EMPTY = -1
"""A place without an expert."""


def deal_places(loads: Sequence[float], now: Sequence[int], num_ranks: int) -> list[int]:
    """The expert of each place, ranks' places one after another.

    The most loaded experts get the places that are left over (each time the one with the most load a place); then the heaviest
    shares go to the least loaded rank that has a place and not the same expert. On a rank, experts that stay stay where they are.

    Args:
        loads: of each expert.
        now: of each place; `EMPTY` may be among them.
    """
    copies, room = [1] * len(loads), len(now) // num_ranks
    heaviest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(len(now) - len(loads)):
        _, expert = heaviest[0]
        copies[expert] += 1
        # No more copies than ranks: a second one on a rank helps nobody.
        worth = loads[expert] / copies[expert] if copies[expert] < num_ranks else -1.0
        heapq.heapreplace(heaviest, (-worth, expert))
    shares = sorted(((loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e])), reverse=True)
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    weights = [0.0] * num_ranks
    for share, expert in shares:
        free = [rank for rank in range(num_ranks) if len(taken[rank]) < room]
        rank = min(free, key=lambda rank: (expert in taken[rank], weights[rank], rank))
        taken[rank].append(expert)
        weights[rank] += share
    return [each for rank in range(num_ranks) for each in _settle(taken[rank], now[rank * room : (rank + 1) * room])]


def _settle(experts: list[int], now: Sequence[int]) -> list[int]:
    """These experts in the places of one rank: who is there already stays."""
    coming, places = list(experts), [EMPTY] * len(now)
    for place, expert in enumerate(now):
        if expert in coming:
            coming.remove(expert)
            places[place] = expert
    return [expert if expert != EMPTY else coming.pop() for expert in places]


def evenness(loads: Sequence[float], places: Sequence[int], num_ranks: int) -> float:
    """The mean load of ranks by the largest: 1 where all have the same."""
    share = [loads[expert] / places.count(expert) if expert != EMPTY else 0.0 for expert in places]
    room = len(places) // num_ranks
    ranks = [sum(share[rank * room : (rank + 1) * room]) for rank in range(num_ranks)]
    return sum(ranks) / num_ranks / max(ranks) if max(ranks) else 1.0


class ExpertPlaces:
    """Where one layer's experts are, on all ranks.

    Attributes:
        now: the expert of each place.
        room: places of a rank. `first`: this rank's first one.
        owners_E: int64; the rank of each place.
    """

    def __init__(self, num_experts: int, plan: ParallelPlan, ranks: Communicator, device: torch.device) -> None:
        num_places = plan.places(num_experts)
        self._ranks, self._plan, self._experts = ranks, plan, num_experts
        self.room, self._most = num_places // plan.num_owners, num_places - num_experts + 1
        self.first = plan.owner * self.room
        self.owners_E = torch.arange(num_places, device=device) // self.room
        self._loads_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._table_EM = torch.zeros(self._experts, self._most, dtype=torch.int32, device=device)
        self._counts_E = torch.ones(self._experts, dtype=torch.int64, device=device)
        self.now: list[int] = []

    def as_loaded(self) -> None:
        """Weights were read: each rank has its own share, in order, in its first places."""
        owners = self._plan.owners(self._experts)
        shares = ([e for e, owner in enumerate(owners) if owner == rank] for rank in range(self._plan.num_owners))
        self.now = [e for own in shares for e in (own + [EMPTY] * self.room)[: self.room]]

    def forget_loads(self) -> None:
        """Begin to count."""
        self._loads_E.zero_()

    def find(self, ids_TK: Tensor, num_tokens: Tensor) -> Tensor:
        """The places of a step's experts; the first `num_tokens[0]` tokens are counted."""
        ids, token_T1 = ids_TK.long(), torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
        self._loads_E.index_add_(0, ids.flatten(), (token_T1 < num_tokens[0]).expand_as(ids).flatten().long())
        return self._table_EM[ids, token_T1 % self._counts_E[ids]]

    def read_loads(self) -> list[int]:
        """What was counted; counting begins anew."""
        self._ranks.all_reduce(self._loads_E)  # the same numbers everywhere, whatever happens
        loads = self._loads_E.tolist()
        self.forget_loads()
        return loads

    def deal(self, loads: Sequence[float], weights: Sequence[Tensor]) -> None:
        """Deal the places anew, and bring each rank the weights [room, ...] of what it gets."""
        new, mine = deal_places(loads, self.now, self._ranks.size), self._ranks.rank
        ways: list[tuple[int, int]] = []
        for target, expert in enumerate(new):
            if self.now[target] != expert:
                rank = target // self.room
                sources = [place for place, old in enumerate(self.now) if old == expert]
                ways.append((min(sources, key=lambda place: (place // self.room != rank, place)), target))
        sent = sorted((way for way in ways if way[0] // self.room == mine), key=lambda way: way[1])
        came = sorted(
            (way for way in ways if way[1] // self.room == mine), key=lambda way: (way[0] // self.room, way[1])
        )
        counts = [sum(target // self.room == rank for _, target in sent) for rank in range(self._ranks.size)]
        out_counts = [sum(source // self.room == rank for source, _ in came) for rank in range(self._ranks.size)]
        was_silent, self._ranks.is_silent = self._ranks.is_silent, False  # no rehearsal: weights come
        for weight in weights if ways else ():
            rows = weight.view(self.room, -1).view(torch.uint8)
            out = rows.new_empty(len(came), rows.shape[1])
            self._ranks.all_to_all(rows[[source % self.room for source, _ in sent]], counts, out, out_counts)
            rows[[target % self.room for _, target in came]] = out
        self._ranks.is_silent = was_silent
        self._take(new)

    def _take(self, new: list[int]) -> None:
        self.now = new
        places: list[list[int]] = [[] for _ in range(self._experts)]
        for place, expert in enumerate(new):
            places[expert].append(place)
        rows = [(each * self._most)[: self._most] for each in places]
        self._table_EM.copy_(torch.tensor(rows, dtype=torch.int32))
        self._counts_E.copy_(torch.tensor([len(each) for each in places]))
