import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.oracles.free_pages import free_blocks

from quire.core import block_pool
from quire.core.block_pool import BlockPool
from quire.errors import ConfigError, EngineError


def key(number: int) -> tuple[bytes, int]:
    return bytes([number]), 0


def publish(pool: BlockPool, block: int, key: tuple[bytes, int]) -> bool:
    """Whether a page's content can be found for the first time."""
    return bool(pool.publish_run([block], [key[0]], key[1]))


def test_a_pool_of_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        BlockPool(1)


def test_page_zero_is_never_handed_out() -> None:
    assert sorted(BlockPool(5).allocate(4)) == [1, 2, 3, 4]


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(EngineError, match="4 pages asked for, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(EngineError, match="freed twice"):
        pool.free(blocks)


def test_pages_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    publish(pool, first, key(1))
    pool.free([first, second, third])
    assert set(pool.allocate(2)) == {second, third}
    assert pool.find_cached(key(1)) == first


def test_the_least_recently_freed_cached_page_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        publish(pool, block, key(number))
    pool.free([blocks[2], blocks[0], blocks[1]])
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find_cached(key(2)) is None and pool.find_cached(key(0)) == blocks[0]


def test_sharing_revives_a_free_cached_page_from_the_middle_of_the_list() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        publish(pool, block, key(number))
    pool.free(blocks)
    pool.share([blocks[1]])
    assert pool.reference_count(blocks[1]) == 1 and pool.num_free == 3
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[3]]


def test_a_free_page_without_content_cannot_be_shared() -> None:
    pool = BlockPool(3)
    with pytest.raises(EngineError, match="holds nothing"):
        pool.share([1])


def test_content_is_found_where_it_was_published_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert publish(pool, first, key(1)) and not publish(pool, second, key(1))
    assert pool.find_cached(key(1)) == first


def test_null_pages_are_passed_over() -> None:
    pool = BlockPool(3)
    pool.share([0])
    pool.free([0])
    assert pool.num_free == 2


def test_clearing_forgets_content_and_keeps_owners() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    publish(pool, blocks[0], key(1))
    assert pool.clear_cache() == 1 and pool.find_cached(key(1)) is None
    assert pool.reference_count(blocks[0]) == 1


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.references: Counter[int] = Counter()
        self.content: dict[tuple[bytes, int], int] = {}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not any(self.references[block] for block in blocks) and 0 not in blocks
        self.references.update(blocks)
        self.content = {name: block for name, block in self.content.items() if block not in blocks}

    @precondition(lambda self: +self.references)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.references)))
        self.pool.free([block])
        self.references[block] -= 1

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content.values())))
        self.pool.share([block])
        self.references[block] += 1

    @precondition(lambda self: +self.references)
    @rule(data=st.data(), number=st.integers(0, 5))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(+self.references)))
        if block not in self.content.values() and publish(self.pool, block, key(number)):
            assert key(number) not in self.content
            self.content[key(number)] = block

    @rule()
    def agrees(self) -> None:
        for number in range(6):
            assert self.pool.find_cached(key(number)) == self.content.get(key(number))
        free = free_blocks(self.pool)
        assert sorted(free) == [block for block in range(1, 9) if not self.references[block]]
        assert len(free) == self.pool.num_free


def test_the_pool_agrees_with_a_plain_model_of_itself() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=150, deadline=None, print_blob=True))


@pytest.mark.parametrize("seed", range(20))
def test_long_runs_of_pages_change_hands_as_single_ones_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    pools = [BlockPool(60), BlockPool(60)]
    tables: list[tuple[list[int], list[bytes]]] = []
    known: list[list[bytes]] = []
    for turn in range(200):
        action = draw.choice(["begin", "begin", "end", "end", "find"])
        table: list[int] = []
        names: list[bytes] = []
        size = draw.randrange(1, 20)
        if action == "begin" and pools[0].num_free >= size:
            names = [b"%d-%d" % (turn, index) for index in range(draw.randrange(size + 1))]
        elif action == "find" and known:
            names = draw.choice(known)
        else:
            size = 0
        index = draw.randrange(len(tables)) if action == "end" and tables else None
        ended = None if index is None else tables.pop(index)
        results = []
        for pool, long_run in zip(pools, (2, 1000), strict=True):
            monkeypatch.setattr(block_pool, "_LONG_RUN", long_run)
            if ended is not None:
                pool.free(reversed(ended[0]))
            elif action == "find" and size:
                table = pool.find_run(names, 0)
                pool.share(table)
            elif size:
                table = pool.allocate(size)
                pool.publish_run(table[: len(names)], names, 0)
            results.append((table, free_blocks(pool), pool.num_free, [pool.reference_count(b) for b in range(60)]))
        assert results[0] == results[1]
        if table:
            tables.append((table, names))
            known.append(names)
