"""Tokens that go to the ranks of their experts come back with what one rank would have computed for all of them."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from quire.config.engine import TOKEN_EXCHANGES, ParallelConfig
from quire.distributed.communicator import Communicator, SingleRank
from quire.distributed.token_exchange import AllToAll, GatherAll, TokenExchange, open_exchange
from quire.errors import ConfigError
from quire.layers.parallel import ParallelPlan

WIDTH = 5


class Desk:
    """Where threads that play ranks leave tensors for one another."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.left: list[Any] = [None] * size


class ThreadRank(Communicator):
    """One of several ranks that are threads."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self._desk, self.rank, self.size = desk, rank, len(desk.left)
        self.rows_sent = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise AssertionError("an exchange sums nothing over ranks")

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if self.is_silent:
            return
        self._desk.left[self.rank] = tensor.clone()  # it may be a part of `out`
        self._desk.barrier.wait()
        torch.stack(self._desk.left, out=out)
        self._desk.barrier.wait()

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        if self.is_silent:
            return
        self.rows_sent += len(tensor)
        self._desk.left[self.rank] = tensor.split(list(counts))
        self._desk.barrier.wait()
        parts = [left[self.rank] for left in self._desk.left]
        assert [len(part) for part in parts] == list(out_counts)
        out.copy_(torch.cat(parts))
        self._desk.barrier.wait()


def expert(number: int, x_D: torch.Tensor) -> torch.Tensor:
    return torch.sin(x_D * (number + 1))


def computed_by(owned: Sequence[int], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a rank with these experts gives for tokens; others' are passed over."""
    out = torch.zeros_like(x)
    for token, (chosen, weight) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for number, share in zip(chosen, weight, strict=True):
            if number in owned:
                out[token] += share * expert(number, x[token])
    return out


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[int], list[torch.Tensor]]:
    """Ranks, the owner of each expert, and each rank's tokens' experts: ranks may have no tokens, and no token may want them."""
    size, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    owners = draw(st.lists(st.integers(0, size), min_size=top_k, max_size=9))
    row = st.lists(st.integers(0, len(owners) - 1), min_size=top_k, max_size=top_k, unique=True)
    rows = [draw(st.lists(row, max_size=6)) for _ in range(size)]
    return size, owners, [torch.tensor(each, dtype=torch.int32).view(-1, top_k) for each in rows]


@pytest.mark.parametrize("kind", [AllToAll, GatherAll])
@given(drawn=routings(), room=st.integers(0, 2))
def test_drawn_routings(kind: type[TokenExchange], drawn: tuple[int, list[int], list[torch.Tensor]], room: int) -> None:
    size, owners, ids = drawn
    desk, generator = Desk(size), torch.Generator().manual_seed(7)
    x = [torch.randn(len(each), WIDTH, generator=generator) for each in ids]
    weights = [torch.rand(each.shape, generator=generator) for each in ids]

    def run(rank: int) -> tuple[torch.Tensor, int, int]:
        mine = [number for number, owner in enumerate(owners) if owner == rank]
        out, group, computed = torch.full_like(x[rank], torch.nan), ThreadRank(desk, rank), 0

        def experts(*tokens: torch.Tensor) -> torch.Tensor:
            nonlocal computed
            computed = len(tokens[0])
            assert computed
            return computed_by(mine, *tokens)

        exchange = kind(group)
        exchange.most = max(map(len, ids)) + room
        exchange.run(x[rank], ids[rank], weights[rank], torch.tensor(owners), experts, out)
        return out, group.rows_sent, computed

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    has_owner = [number for number, owner in enumerate(owners) if owner < size]
    for rank, (out, _, _) in enumerate(found):
        torch.testing.assert_close(out, computed_by(has_owner, x[rank], ids[rank], weights[rank]))
    if kind is GatherAll:
        return
    # A token goes once to a rank, however many experts it has there, and to nobody who has none.
    wanted = [{owners[number] for number in row} - {size} for each in ids for row in each.tolist()]
    assert sum(computed for _, _, computed in found) == sum(map(len, wanted))
    assert [sum(rank in ranks for ranks in wanted) for rank in range(size)] == [computed for *_, computed in found]


@pytest.mark.parametrize(("kind", "count"), [(AllToAll, 4), (GatherAll, 12)])
def test_a_silent_rehearsal_runs_this_ranks_experts_and_waits_for_nobody(kind: type[TokenExchange], count: int) -> None:
    group, seen = ThreadRank(Desk(3), 1), list[int]()
    group.is_silent = True
    x, ids = torch.ones(4, WIDTH), torch.zeros(4, 2, dtype=torch.int32)

    def experts(*tokens: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens[0]))
        return tokens[0]

    kind(group).run(x, ids, torch.ones(4, 2), torch.tensor([0, 1, 2]), experts, torch.empty_like(x))
    assert seen == [count]


class Launches(TorchDispatchMode):
    """Counts operations that are more than views and fresh memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


class NobodyElse(ThreadRank):
    """A rank whose others send nothing."""

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        assert tensor.data_ptr() == out[self.rank].data_ptr() and out.is_contiguous()

    def all_to_all(
        self, tensor: torch.Tensor, counts: Sequence[int], out: torch.Tensor, out_counts: Sequence[int]
    ) -> None:
        assert tensor.is_contiguous() and out.is_contiguous()


@pytest.mark.parametrize(("most", "count"), [(4, 6), (6, 7)])
def test_gathering_launches_few_operations(most: int, count: int) -> None:
    """Small steps take as long as launching them: three copies into what is sent, two out of what came, and a sum."""
    exchange, x, ids = GatherAll(NobodyElse(Desk(2), 0)), torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    exchange.most, weights, owners = most, torch.ones(4, 2), torch.zeros(9)
    with Launches() as launches:
        exchange.run(x, ids, weights, owners, lambda *tokens: tokens[0], torch.empty_like(x))
    assert launches.count == count


@pytest.mark.parametrize(("size", "count"), [(2, 7), (4, 3), (4, 16), (3, 0)])
def test_ranks_bring_each_token_once_and_know_each_experts_owner(size: int, count: int) -> None:
    plans = [ParallelPlan(size, rank, expert_parallel=True) for rank in range(size)]
    assert [token for plan in plans for token in range(count)[plan.tokens(count)]] == list(range(count))
    if count >= size:
        assert all(
            number in range(count)[plans[rank].experts(count)] for number, rank in enumerate(plans[0].owners(count))
        )
        assert len(plans[0].owners(count)) == count


class Mine(AllToAll):
    """A vendor's own."""


def test_the_setting_names_an_exchange_or_sums() -> None:
    group = ThreadRank(Desk(2), 0)
    for name in ("allgather_reducescatter", "deepep_low_latency"):
        assert open_exchange(ParallelConfig(all2all_backend=name), group) is None
    assert type(open_exchange(ParallelConfig(all2all_backend="all_to_all"), group)) is AllToAll
    assert open_exchange(ParallelConfig(all2all_backend="all_to_all"), SingleRank()) is None
    with_copies = SingleRank()
    with_copies.copies = group
    assert type(open_exchange(ParallelConfig(), with_copies)) is GatherAll
    assert type(open_exchange(ParallelConfig(all2all_backend="all_to_all"), with_copies)) is AllToAll
    own = ParallelConfig(all2all_backend=f"{__name__}:Mine")
    assert type(open_exchange(own, group)).__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"not a subclass of .*TokenExchange"):
        open_exchange(ParallelConfig(all2all_backend="json:JSONDecoder"), group)
    TOKEN_EXCHANGES.register("links", Mine, owner="a test")
    try:
        assert type(open_exchange(ParallelConfig(all2all_backend="links"), group)) is Mine
    finally:
        TOKEN_EXCHANGES.unregister("links")
