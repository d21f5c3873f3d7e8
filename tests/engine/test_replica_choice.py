"""Choosing replicas: by load, by cached prefix, and never losing count."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.replica_choice import ANSWERING_TOKENS, Assignment, ReplicaChooser, chain_of


def test_a_prompt_goes_where_its_beginning_was_computed_until_waiting_there_costs_more() -> None:
    chooser = ReplicaChooser(3)
    keys = chain_of([b"a", b"b", b"c", b"d"])
    first = chooser.choose(keys, 1000, 4000, range(3))
    chooser.end(first)
    chosen = [chooser.choose(keys, 1000, 4100, range(3)).replica for _ in range(30)]
    assert chosen[0] == first.replica
    crowd = chosen.index(next(each for each in chosen if each != first.replica))
    assert 4000 / (ANSWERING_TOKENS + 100) - 2 <= crowd <= 4000 / (ANSWERING_TOKENS + 100) + 2


def test_a_prompt_with_another_root_shares_nothing() -> None:
    assert not set(chain_of([b"a", b"b"], "salt")) & set(chain_of([b"a", b"b"]))
    assert chain_of([b"a", b"b"])[0] == chain_of([b"a", b"c"])[0] != chain_of([b"b", b"a"])[0]


def test_a_replica_that_lost_its_cache_is_not_preferred() -> None:
    chooser = ReplicaChooser(2)
    keys = chain_of([b"a"])
    first = chooser.choose(keys, 500, 500, range(2))
    chooser.end(first)
    chooser.forget(first.replica)
    assert chooser.choose(keys, 500, 500, range(2)).replica != first.replica  # the next one in turn


def test_without_prefixes_equal_loads_take_turns() -> None:
    chooser = ReplicaChooser(3, by_prefix=False)
    keys = chain_of([b"a"])
    assert [chooser.choose(keys, 500, 500, range(3)).replica for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loads_are_the_sums_of_what_has_not_ended(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    chooser, alive = ReplicaChooser(count, max_keys=6), list[Assignment]()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "begin", "end", "forget"]))
        if action == "add":
            usable = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
            pieces = data.draw(st.lists(st.sampled_from([b"a", b"b"]), max_size=4))
            alive.append(chooser.choose(chain_of(pieces), 10, 10 * len(pieces) + 3, usable))
            assert alive[-1].replica in usable and alive[-1].waiting >= 3
        elif action == "forget":
            chooser.forget(data.draw(st.integers(0, count - 1)))
        elif alive:
            one = data.draw(st.integers(0, len(alive) - 1))
            chooser.begin_answer(alive[one])
            if action == "end":
                chooser.end(alive.pop(one))
        for replica, load in enumerate(chooser.loads):
            mine = [each for each in alive if each.replica == replica]
            assert (load.num_requests, load.num_tokens) == (len(mine), sum(each.waiting for each in mine))
        assert len(chooser._holders) <= 6
